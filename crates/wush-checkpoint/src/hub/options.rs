//! Where the hub is and how it is used, as the environment says. Enters: variables. Leaves: [`HubOptions`]. Connects
//! to nothing.

use std::fmt;
use std::path::{Path, PathBuf};

/// Where the hub is and how it is used. [`HubOptions::default`] reads the environment as Python's client does.
#[derive(Clone)]
pub struct HubOptions {
    /// Base URL; `None` is `https://huggingface.co`. Default: `HF_ENDPOINT`.
    pub endpoint: Option<String>,
    /// Access token. Default: `HF_TOKEN`, else the file at `HF_TOKEN_PATH`, else `HF_HOME/token`.
    pub token: Option<String>,
    /// Cache directory; `None` is a directory `hub` below the working directory's `.cache/huggingface`. Default:
    /// `HF_HUB_CACHE`, else `HF_HOME/hub`, else `~/.cache/huggingface/hub`.
    pub cache_dir: Option<PathBuf>,
    /// Use the cache only. Default: `HF_HUB_OFFLINE` (or `TRANSFORMERS_OFFLINE`) is 1, on, yes or true.
    pub offline: bool,
}

impl fmt::Debug for HubOptions {
    /// The token is a secret: only whether there is one is shown.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HubOptions")
            .field("endpoint", &self.endpoint)
            .field("token", &self.token.as_ref().map(|_| "(hidden)"))
            .field("cache_dir", &self.cache_dir)
            .field("offline", &self.offline)
            .finish()
    }
}

impl Default for HubOptions {
    fn default() -> Self {
        Self::from_variables(|name| std::env::var(name).ok())
    }
}

impl HubOptions {
    /// Reads the variables through `get`. An empty variable counts as absent.
    fn from_variables(get: impl Fn(&str) -> Option<String>) -> Self {
        let get = |name: &str| get(name).filter(|value| !value.is_empty());
        let hf_home = get("HF_HOME")
            .map(PathBuf::from)
            .or_else(|| get("XDG_CACHE_HOME").map(|dir| Path::new(&dir).join("huggingface")))
            .or_else(|| get("HOME").map(|dir| Path::new(&dir).join(".cache/huggingface")));
        let cache_dir = get("HF_HUB_CACHE")
            .or_else(|| get("HUGGINGFACE_HUB_CACHE"))
            .map(PathBuf::from)
            .or_else(|| hf_home.as_ref().map(|home| home.join("hub")));
        let token_file = get("HF_TOKEN_PATH").map(PathBuf::from).or_else(|| hf_home.map(|home| home.join("token")));
        let stored = || token_file.and_then(|path| std::fs::read_to_string(path).ok());
        let token = get("HF_TOKEN").or_else(stored).map(|token| token.trim().to_owned());
        let offline = get("HF_HUB_OFFLINE").or_else(|| get("TRANSFORMERS_OFFLINE"));
        Self {
            endpoint: get("HF_ENDPOINT"),
            token: token.filter(|token| !token.is_empty()),
            cache_dir,
            offline: offline.is_some_and(|value| is_true(&value)),
        }
    }
}

fn is_true(value: &str) -> bool {
    ["1", "on", "yes", "true"].iter().any(|word| value.eq_ignore_ascii_case(word))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(variables: &[(&str, &str)]) -> HubOptions {
        HubOptions::from_variables(|name| {
            variables.iter().find(|(key, _)| *key == name).map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn cache_directory_follows_pythons_order() {
        let cases: &[(&[(&str, &str)], &str)] = &[
            (&[("HF_HUB_CACHE", "/a"), ("HF_HOME", "/b"), ("HOME", "/c")], "/a"),
            (&[("HUGGINGFACE_HUB_CACHE", "/old"), ("HF_HOME", "/b")], "/old"),
            (&[("HF_HUB_CACHE", ""), ("HF_HOME", "/b"), ("HOME", "/c")], "/b/hub"),
            (&[("XDG_CACHE_HOME", "/x"), ("HOME", "/c")], "/x/huggingface/hub"),
            (&[("HOME", "/c")], "/c/.cache/huggingface/hub"),
        ];
        for (variables, expected) in cases {
            assert_eq!(options(variables).cache_dir.as_deref(), Some(Path::new(expected)), "{variables:?}");
        }
    }

    #[test]
    fn token_comes_from_the_variable_or_the_file() {
        let dir = tempfile::tempdir().expect("temporary directory");
        std::fs::write(dir.path().join("token"), " from-file\n").expect("writable");
        let home = dir.path().to_str().expect("UTF-8");
        assert_eq!(options(&[("HF_HOME", home)]).token.as_deref(), Some("from-file"));
        assert_eq!(options(&[("HF_HOME", home), ("HF_TOKEN", "given")]).token.as_deref(), Some("given"));
        let elsewhere = dir.path().join("token");
        let elsewhere = elsewhere.to_str().expect("UTF-8");
        assert_eq!(options(&[("HF_TOKEN_PATH", elsewhere)]).token.as_deref(), Some("from-file"));
        assert_eq!(options(&[("HF_HOME", "/does/not/exist")]).token, None);
    }

    #[test]
    fn offline_is_what_python_takes_for_true() {
        for (value, expected) in [("1", true), ("ON", true), ("yes", true), ("True", true), ("0", false), ("", false)] {
            assert_eq!(options(&[("HF_HUB_OFFLINE", value)]).offline, expected, "{value}");
        }
        assert!(options(&[("TRANSFORMERS_OFFLINE", "1")]).offline);
        assert!(!options(&[]).offline);
    }

    #[test]
    fn token_is_not_shown() {
        let shown = format!("{:?}", options(&[("HF_TOKEN", "hf_secret")]));
        assert!(!shown.contains("hf_secret") && shown.contains("hidden"), "{shown}");
    }
}
