//! Which blocks of device memory are in use and which wait to be used again, within a budget. Arithmetic only: where blocks
//! come from is a trait, so that the rules are tested without a device.
//!
//! Blocks are handed on in the order of the host's calls. All work on them runs in one stream, or waits for it, so a block that
//! is released while a kernel still reads it is written only by later kernels.

use std::collections::BTreeMap;

use crate::error::{GpuError, Result};

/// Sizes are rounded up to this below [`LARGE`], so that nearly equal ones share blocks.
const SMALL_STEP: u64 = 512;
/// From here on sizes are rounded up to [`LARGE_STEP`], the page size of device memory.
const LARGE: u64 = 1 << 20;
/// Rounding of large sizes.
const LARGE_STEP: u64 = 2 << 20;
/// A block serves a request of at least this share of its size: what it wastes stays below an eighth.
const LEAST_USE: (u64, u64) = (7, 8);

/// Where blocks come from.
pub trait Source {
    /// A new block; none when the device has no room for it.
    ///
    /// # Errors
    /// Whatever else the device says.
    fn allocate(&mut self, n_bytes: u64) -> Result<Option<u64>>;

    /// Takes blocks back, once nothing that was begun uses them any more.
    ///
    /// # Errors
    /// Whatever the device says.
    fn free(&mut self, blocks: &[u64]) -> Result<()>;
}

/// Device memory of one process, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MemoryUse {
    /// Of live buffers, as rounded.
    pub in_use: u64,
    /// Taken from the device: in use, or kept to be used again.
    pub reserved: u64,
    /// The most that was ever in use.
    pub peak_in_use: u64,
    /// The most that was ever reserved.
    pub peak_reserved: u64,
    /// Bound on what is reserved.
    pub budget: u64,
}

/// The blocks of one device.
#[derive(Debug)]
pub struct Pool {
    usage: MemoryUse,
    /// Bytes beyond which idle blocks are given back before more is reserved.
    planned: u64,
    /// Free blocks by size.
    idle: BTreeMap<u64, Vec<u64>>,
}

impl Pool {
    /// An empty pool that reserves at most `budget` bytes.
    pub fn new(budget: u64) -> Self {
        Self { usage: MemoryUse { budget, ..MemoryUse::default() }, planned: budget, idle: BTreeMap::new() }
    }

    /// What is used now, and was at most.
    pub fn usage(&self) -> MemoryUse {
        self.usage
    }

    /// Changes the budget, and what should do: idle blocks are not kept beyond `planned` bytes. What is reserved beyond either stays
    /// until it is idle.
    pub fn set_budget(&mut self, planned: u64, budget: u64) {
        self.planned = planned.min(budget);
        self.usage.budget = budget;
    }

    /// A block of at least `n_bytes`: its address and its size.
    ///
    /// # Errors
    /// `OutOfMemory` when neither the budget nor the device has room, idle blocks given back; the source's own.
    pub fn take(&mut self, n_bytes: u64, source: &mut impl Source) -> Result<(u64, u64)> {
        let size = rounded(n_bytes).ok_or_else(|| self.exhausted(n_bytes))?;
        if let Some(block) = self.reuse(size) {
            return Ok(block);
        }
        if self.usage.reserved.saturating_add(size) > self.planned {
            self.trim(source)?;
        }
        if self.usage.reserved.saturating_add(size) > self.usage.budget {
            return Err(self.exhausted(size));
        }
        let address = match source.allocate(size)? {
            Some(address) => address,
            None => {
                self.trim(source)?;
                // Others have the rest: what was had is the limit.
                let refused =
                    || GpuError::OutOfMemory { wanted: size, in_use: self.usage.in_use, limit: self.usage.reserved };
                source.allocate(size)?.ok_or_else(refused)?
            }
        };
        self.usage.reserved += size;
        self.usage.peak_reserved = self.usage.peak_reserved.max(self.usage.reserved);
        self.enter(size);
        Ok((address, size))
    }

    /// Takes a block back for later use; `block` as [`Pool::take`] gave it.
    pub fn put(&mut self, (address, size): (u64, u64)) {
        self.usage.in_use -= size;
        self.idle.entry(size).or_default().push(address);
    }

    /// Gives all idle blocks back to the device.
    ///
    /// # Errors
    /// The source's own.
    pub fn trim(&mut self, source: &mut impl Source) -> Result<()> {
        for (size, blocks) in std::mem::take(&mut self.idle) {
            source.free(&blocks)?;
            self.usage.reserved -= size * blocks.len() as u64;
        }
        Ok(())
    }

    fn reuse(&mut self, size: u64) -> Option<(u64, u64)> {
        let (&found, blocks) = self.idle.range_mut(size..=most_for(size)).next()?;
        let address = blocks.pop().expect("no size without blocks is kept");
        if blocks.is_empty() {
            self.idle.remove(&found);
        }
        self.enter(found);
        Some((address, found))
    }

    fn enter(&mut self, size: u64) {
        self.usage.in_use += size;
        self.usage.peak_in_use = self.usage.peak_in_use.max(self.usage.in_use);
    }

    fn exhausted(&self, wanted: u64) -> GpuError {
        GpuError::OutOfMemory { wanted, in_use: self.usage.in_use, limit: self.usage.budget }
    }
}

/// Whether a block of `size` bytes that is idle is handed on for a request of `wanted`.
pub(crate) fn serves(size: u64, wanted: u64) -> bool {
    (wanted..=most_for(wanted)).contains(&size)
}

/// The largest block that a request is given.
fn most_for(wanted: u64) -> u64 {
    wanted.saturating_mul(LEAST_USE.1) / LEAST_USE.0
}

/// The size of the block that holds `n_bytes`; none beyond what an address can reach.
pub(crate) fn rounded(n_bytes: u64) -> Option<u64> {
    let step = if n_bytes < LARGE { SMALL_STEP } else { LARGE_STEP };
    n_bytes.max(1).checked_next_multiple_of(step)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Hands out addresses while there is room.
    struct Fake {
        room: u64,
        next: u64,
        sizes: BTreeMap<u64, u64>,
    }

    impl Fake {
        fn new(room: u64) -> Self {
            Self { room, next: 0, sizes: BTreeMap::new() }
        }
    }

    impl Source for Fake {
        fn allocate(&mut self, n_bytes: u64) -> Result<Option<u64>> {
            if n_bytes > self.room {
                return Ok(None);
            }
            self.room -= n_bytes;
            self.next += 1;
            self.sizes.insert(self.next, n_bytes);
            Ok(Some(self.next))
        }

        fn free(&mut self, blocks: &[u64]) -> Result<()> {
            blocks.iter().for_each(|block| self.room += self.sizes.remove(block).expect("its own block"));
            Ok(())
        }
    }

    #[test]
    fn a_released_block_serves_the_next_request_of_its_size() {
        let (mut pool, mut fake) = (Pool::new(u64::MAX), Fake::new(1 << 30));
        let first = pool.take(100 << 20, &mut fake).expect("room");
        pool.put(first);
        let again = pool.take(99 << 20, &mut fake).expect("room");
        assert_eq!(first, again);
        let usage = pool.usage();
        assert_eq!((usage.in_use, usage.reserved, usage.peak_reserved), (100 << 20, 100 << 20, 100 << 20));
    }

    #[test]
    fn a_block_is_not_wasted_on_a_small_request() {
        let (mut pool, mut fake) = (Pool::new(u64::MAX), Fake::new(1 << 30));
        let large = pool.take(100 << 20, &mut fake).expect("room");
        pool.put(large);
        let small = pool.take(10 << 20, &mut fake).expect("room");
        assert_ne!(large.0, small.0);
        assert_eq!(pool.usage().reserved, 110 << 20);
    }

    #[test]
    fn idle_blocks_are_given_back_before_memory_runs_out() {
        for (budget, room) in [(128 << 20, u64::MAX), (u64::MAX, 128 << 20)] {
            let (mut pool, mut fake) = (Pool::new(budget), Fake::new(room));
            let first = pool.take(100 << 20, &mut fake).expect("room");
            pool.put(first);
            let second = pool.take(50 << 20, &mut fake).expect("room once the first is given back");
            let error = pool.take(100 << 20, &mut fake).expect_err("no room beside the second");
            assert!(
                matches!(error, GpuError::OutOfMemory { wanted, in_use, .. } if (wanted, in_use) == (100 << 20, 50 << 20))
            );
            assert_eq!((second.1, pool.usage().peak_reserved), (50 << 20, 100 << 20));
        }
    }

    #[test]
    fn blocks_of_many_sizes_stay_within_the_plan() {
        let (mut pool, mut fake) = (Pool::new(u64::MAX), Fake::new(u64::MAX));
        pool.set_budget(100 << 20, u64::MAX);
        for mib in [60, 40, 30, 90, 20, 100] {
            let block = pool.take(mib << 20, &mut fake).expect("room");
            pool.put(block);
        }
        assert_eq!(pool.usage().peak_reserved, 100 << 20);
        let more = pool.take(150 << 20, &mut fake).expect("a plan is no bound");
        assert_eq!((more.1, pool.usage().reserved), (150 << 20, 150 << 20));
    }

    #[test]
    fn absurd_sizes_are_errors() {
        let (mut pool, mut fake) = (Pool::new(u64::MAX), Fake::new(1 << 30));
        assert!(matches!(pool.take(u64::MAX, &mut fake), Err(GpuError::OutOfMemory { .. })));
        assert_eq!(pool.take(0, &mut fake).expect("the smallest block").1, SMALL_STEP);
    }
}
