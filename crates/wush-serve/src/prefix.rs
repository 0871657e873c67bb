//! Prefixes of prompts that stay in the cache for prompts to come. Enters: tokens that a sequence holds, and a fork of it. Leaves:
//! the longest kept beginning of a new prompt. Knows nothing of what a fork is.
//!
//! A prefix ends with a whole chunk: how a prompt is cut into chunks decides what is quantized when, so another end would give
//! other numbers than the prompt alone. Of a long prompt the prefixes of 1, 2, 4, … chunks are kept, and the longest: what any
//! two prompts share is found to at least its half.

use wush_runtime::SequenceId;

/// Kept prefixes, at most so many; the least recently used goes first.
#[derive(Debug)]
pub(crate) struct Prefixes {
    entries: Vec<Prefix>,
    most: usize,
    /// Counts uses.
    clock: u64,
}

#[derive(Debug)]
struct Prefix {
    ids: Vec<u32>,
    sequence: SequenceId,
    /// At most so many in the cache, were nothing shared.
    bytes: u64,
    used: u64,
}

/// Whether the first `n` of a prompt's `n_prompt` tokens are worth keeping.
pub(crate) fn is_worth_keeping(n: usize, n_prompt: usize, chunk: usize) -> bool {
    n > 0 && n.is_multiple_of(chunk) && ((n / chunk).is_power_of_two() || n_prompt - n < chunk)
}

impl Prefixes {
    /// None yet.
    pub(crate) fn new(most: usize) -> Self {
        Self { entries: Vec::new(), most, clock: 0 }
    }

    /// Whether any can be kept.
    pub(crate) fn is_on(&self) -> bool {
        self.most > 0
    }

    /// Sequences that begin `prompt` and leave at least one token of it, longest first.
    pub(crate) fn beginnings(&self, prompt: &[u32]) -> Vec<SequenceId> {
        let begins = |entry: &&Prefix| entry.ids.len() < prompt.len() && prompt.starts_with(&entry.ids);
        let mut found: Vec<&Prefix> = self.entries.iter().filter(begins).collect();
        found.sort_unstable_by_key(|entry| std::cmp::Reverse(entry.ids.len()));
        found.into_iter().map(|entry| entry.sequence).collect()
    }

    /// Marks a prefix as used just now.
    pub(crate) fn touch(&mut self, sequence: SequenceId) {
        self.clock += 1;
        let (entries, clock) = (&mut self.entries, self.clock);
        entries.iter_mut().filter(|entry| entry.sequence == sequence).for_each(|entry| entry.used = clock);
    }

    /// Whether exactly these tokens are kept already, which is a use.
    pub(crate) fn has(&mut self, ids: &[u32]) -> bool {
        let found = self.entries.iter().find(|entry| entry.ids == ids).map(|entry| entry.sequence);
        found.inspect(|&sequence| self.touch(sequence)).is_some()
    }

    /// Keeps a prefix.
    pub(crate) fn insert(&mut self, ids: Vec<u32>, sequence: SequenceId, bytes: u64) {
        self.clock += 1;
        self.entries.push(Prefix { ids, sequence, bytes, used: self.clock });
    }

    /// Whether one more would be too many.
    pub(crate) fn is_full(&self) -> bool {
        self.entries.len() >= self.most
    }

    /// Lets go of the least recently used.
    pub(crate) fn pop_oldest(&mut self) -> Option<SequenceId> {
        let (at, _) = self.entries.iter().enumerate().min_by_key(|(_, entry)| entry.used)?;
        Some(self.entries.swap_remove(at).sequence)
    }

    /// Bytes that all of them may take.
    pub(crate) fn bytes(&self) -> u64 {
        self.entries.iter().map(|entry| entry.bytes).sum()
    }

    /// How many there are.
    pub(crate) fn len(&self) -> usize {
        self.entries.len()
    }
}

#[cfg(test)]
mod tests {
    use wush_runtime::{CacheConfig, KvCache, LayerConfig};

    use super::*;

    #[test]
    fn the_longest_beginning_is_found_and_the_least_used_goes() {
        let mut cache = KvCache::new(CacheConfig::new(vec![LayerConfig::new(1, 1, 2)])).expect("a cache");
        let [a, b, c] = [(); 3].map(|()| cache.add());
        let mut prefixes = Prefixes::new(3);
        prefixes.insert(vec![1, 2], a, 10);
        prefixes.insert(vec![1, 2, 3, 4], b, 20);
        prefixes.insert(vec![5], c, 1);
        assert!(prefixes.is_full());
        assert_eq!(prefixes.beginnings(&[1, 2, 3, 4, 5]), [b, a]);
        assert_eq!(prefixes.beginnings(&[1, 2, 3, 4]), [a], "a token must be left to compute");
        assert!(prefixes.beginnings(&[2, 1]).is_empty());
        assert!(prefixes.has(&[1, 2]) && !prefixes.has(&[1]));
        prefixes.touch(c);
        assert_eq!(prefixes.bytes(), 31);
        assert_eq!([prefixes.pop_oldest(), prefixes.pop_oldest(), prefixes.pop_oldest()], [Some(b), Some(a), Some(c)]);
        assert_eq!((prefixes.pop_oldest(), prefixes.len()), (None, 0));
    }

    #[test]
    fn doublings_and_the_longest_are_kept() {
        let kept: Vec<usize> = (0..=75).filter(|&n| is_worth_keeping(n, 75, 10)).collect();
        assert_eq!(kept, [10, 20, 40, 70]);
        assert!(is_worth_keeping(30, 30, 10) && !is_worth_keeping(30, 40, 10));
    }
}
