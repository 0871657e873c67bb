//! The API key. Enters: the key, and what a client sent. Leaves: whether they are the same, in a time that tells nothing of either.

use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

/// A key that clients must send as `Authorization: Bearer KEY`. Only its digest is kept.
#[derive(Clone)]
pub struct ApiKey([u8; 32]);

impl std::fmt::Debug for ApiKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("ApiKey(…)")
    }
}

impl ApiKey {
    /// None for a key that is empty or that no header can hold.
    pub fn new(key: &str) -> Option<Self> {
        let is_plain = !key.is_empty() && key.bytes().all(|byte| byte.is_ascii_graphic());
        is_plain.then(|| Self(digest(key)))
    }

    /// Whether `sent` is the key. Digests have one length, and are compared whole.
    pub fn is(&self, sent: &str) -> bool {
        self.0.ct_eq(&digest(sent)).into()
    }

    /// Whether an `Authorization` header has the key.
    pub(crate) fn is_in(&self, header: Option<&str>) -> bool {
        let sent = header.and_then(|header| header.split_once(' '));
        sent.is_some_and(|(scheme, key)| scheme.eq_ignore_ascii_case("bearer") && self.is(key.trim()))
    }
}

fn digest(text: &str) -> [u8; 32] {
    Sha256::digest(text.as_bytes()).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_whole_key_of_the_right_scheme_is_taken() {
        let key = ApiKey::new("a-key").expect("plain");
        for (header, expected) in [
            (Some("Bearer a-key"), true),
            (Some("bearer  a-key "), true),
            (Some("Bearer a-ke"), false),
            (Some("Bearer a-key2"), false),
            (Some("Bearer "), false),
            (Some("Basic a-key"), false),
            (Some("a-key"), false),
            (None, false),
        ] {
            assert_eq!(key.is_in(header), expected, "{header:?}");
        }
        assert!(ApiKey::new("").is_none() && ApiKey::new("two words").is_none() && ApiKey::new("line\n").is_none());
        assert_eq!(format!("{key:?}"), "ApiKey(…)");
    }
}
