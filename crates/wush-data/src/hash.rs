//! What identifies token sequences. Enters: ids. Leaves: SHA-256 digests.

use wush_format::hash::Sha;

/// SHA-256 of one sequence: its length as little-endian u64, then its ids as little-endian u32.
pub fn sequence_hash(ids: &[u32]) -> Sha {
    let mut bytes = Vec::with_capacity(8 + 4 * ids.len());
    push(&mut bytes, ids);
    Sha::of(&bytes)
}

/// SHA-256 of sequences in order: the concatenation of what [`sequence_hash`] takes of each.
pub fn tokens_hash(sequences: &[Vec<u32>]) -> Sha {
    let mut bytes = Vec::with_capacity(sequences.iter().map(|ids| 8 + 4 * ids.len()).sum());
    sequences.iter().for_each(|ids| push(&mut bytes, ids));
    Sha::of(&bytes)
}

fn push(bytes: &mut Vec<u8>, ids: &[u32]) {
    bytes.extend_from_slice(&(ids.len() as u64).to_le_bytes());
    ids.iter().for_each(|id| bytes.extend_from_slice(&id.to_le_bytes()));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_sequence_hashes_as_written() {
        // Python: hashlib.sha256(struct.pack("<QII", 2, 1, 258)).hexdigest()
        let expected = "63666746b40cd3ee26094b3a844429e90b5a9837926e063100575aed05d44e7e";
        assert_eq!(sequence_hash(&[1, 258]).to_string(), expected);
        assert_eq!(sequence_hash(&[1, 258]), tokens_hash(&[vec![1, 258]]));
    }

    #[test]
    fn sequences_hash_as_their_concatenation() {
        // Python: hashlib.sha256(struct.pack("<QIIQI", 2, 1, 258, 1, 7)).hexdigest()
        let expected = "a7d52ff349196c0e0f097d0c827f5b2522d6183b35729d4e0425d7ce55e4a6fe";
        assert_eq!(tokens_hash(&[vec![1, 258], vec![7]]).to_string(), expected);
    }

    #[test]
    fn cuts_matter() {
        assert_ne!(tokens_hash(&[vec![1, 2], vec![3]]), tokens_hash(&[vec![1], vec![2, 3]]));
        assert_ne!(tokens_hash(&[]), tokens_hash(&[vec![]]));
    }
}
