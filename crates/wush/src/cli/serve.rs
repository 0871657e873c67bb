//! `wush serve`: a model over HTTP.

use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::time::Duration;

use clap::Args;
use wush_pipeline::request::{Limits, ServeRequest};

use super::generate::CacheArgs;
use super::{ModelArgs, whole_number};

/// `wush serve`.
#[derive(Debug, Args)]
pub struct ServeArgs {
    #[command(flatten)]
    model: ModelArgs,
    #[command(flatten)]
    server: ServerArgs,
    #[command(flatten)]
    limits: LimitsArgs,
    #[command(flatten)]
    cache: CacheArgs,
}

/// The server.
#[derive(Debug, Args)]
#[command(next_help_heading = "Server")]
struct ServerArgs {
    /// Address or name to listen on; 0.0.0.0 lets other machines in
    #[arg(long, value_name = "HOST", default_value_t = wush_pipeline::DEFAULT_HOST, value_parser = host)]
    host: IpAddr,
    /// Port to listen on; 0 takes any that is free, and says which
    #[arg(long, value_name = "N", default_value_t = wush_pipeline::DEFAULT_PORT)]
    port: u16,
    /// Key that clients must send (Authorization: Bearer KEY). Better in the environment, where no list of processes shows it
    #[arg(long, value_name = "KEY", env = "WUSH_API_KEY", hide_env_values = true)]
    api_key: Option<String>,
    /// What the model is called in requests and answers [default: its own name]
    #[arg(long, value_name = "NAME")]
    model_name: Option<String>,
}

/// Its bounds.
#[derive(Debug, Args)]
#[command(next_help_heading = "Bounds")]
struct LimitsArgs {
    /// Texts that are computed at once; each prompt of a request is one
    #[arg(long, value_name = "N", default_value_t = Limits::default().max_running, value_parser = whole_number)]
    max_running: usize,
    /// Texts that wait beside them; more are refused (429)
    #[arg(long, value_name = "N", default_value_t = Limits::default().max_waiting, value_parser = whole_number)]
    max_waiting: usize,
    /// Tokens of a text, prompt and answer; longer ones are refused (400) [default: the model's positions]
    #[arg(long, value_name = "N", value_parser = whole_number)]
    max_len: Option<usize>,
    /// Memory for keys and values of all texts and kept prefixes, such as 500MB; texts wait until there is room
    #[arg(long, value_name = "SIZE", default_value = "4GB", value_parser = size)]
    cache_memory: u64,
    /// Size of a request's body; larger ones are refused (413)
    #[arg(long, value_name = "SIZE", default_value = "4MB", value_parser = size)]
    max_body: u64,
    /// Beginnings of prompts that stay in the cache for prompts to come, which gives the same tokens sooner; 0 for none
    #[arg(long, value_name = "N", default_value_t = Limits::default().max_prefixes, value_parser = whole_number)]
    prefixes: usize,
    /// Time that requests have to end in after SIGTERM or Ctrl-C
    #[arg(long, value_name = "SECONDS", default_value_t = Limits::default().grace.as_secs())]
    grace: u64,
}

/// An address, or that of a name such as localhost; of several the first of IPv4, as the default is one.
fn host(text: &str) -> Result<IpAddr, String> {
    let bare = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text);
    if let Ok(address) = bare.parse() {
        return Ok(address);
    }
    let is_name = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | '_');
    if text.is_empty() || !text.chars().all(is_name) {
        return Err("expected an address, such as 127.0.0.1 or ::1, or a name such as localhost".to_owned());
    }
    let found: Vec<IpAddr> = match (text, 0).to_socket_addrs() {
        Ok(found) => found.map(|address| address.ip()).collect(),
        Err(error) => return Err(format!("expected an address or a name of this machine: {error}")),
    };
    let first = found.iter().find(|address| address.is_ipv4()).or(found.first());
    first.copied().ok_or_else(|| "the name has no address".to_owned())
}

/// Bytes: a whole number with B, kB, MB or GB, or without.
fn size(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let unit: u64 = match text[digits.len()..].to_ascii_lowercase().as_str() {
        "" | "b" => 1,
        "kb" => 1_000,
        "mb" => 1_000_000,
        "gb" => 1_000_000_000,
        _ => return Err("expected a size, such as 500MB or 4GB".to_owned()),
    };
    let n: Option<u64> = digits.parse().ok();
    n.and_then(|n| n.checked_mul(unit)).ok_or_else(|| "expected a size, such as 500MB or 4GB".to_owned())
}

impl ServeArgs {
    /// The request that was typed.
    pub fn request(self) -> ServeRequest {
        let Self { model, server, limits, cache } = self;
        let LimitsArgs { max_running, max_waiting, max_len, cache_memory, max_body, prefixes, grace } = limits;
        let cache = cache.request();
        ServeRequest {
            model: model.request(),
            address: SocketAddr::new(server.host, server.port),
            api_key: server.api_key,
            model_name: server.model_name,
            limits: Limits {
                max_running,
                max_waiting,
                max_len,
                max_cache_bytes: cache_memory,
                max_body_bytes: usize::try_from(max_body).unwrap_or(usize::MAX - 1),
                max_prefixes: prefixes,
                chunk: cache.chunk,
                grace: Duration::from_secs(grace),
            },
            cache,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_addresses_or_names() {
        for (text, expected) in [
            ("127.0.0.1", "127.0.0.1"),
            ("::1", "::1"),
            ("[::1]", "::1"),
            ("0.0.0.0", "0.0.0.0"),
            ("localhost", "127.0.0.1"),
        ] {
            assert_eq!(host(text).map(|address| address.to_string()).as_deref(), Ok(expected));
        }
        for text in ["", "two words", "http://localhost", "127.0.0.1:80"] {
            assert!(host(text).is_err(), "{text}");
        }
    }

    #[test]
    fn sizes_have_units_or_none() {
        for (text, expected) in
            [("0", 0), ("12", 12), ("7B", 7), ("3kB", 3000), ("500MB", 500_000_000), ("4gb", 4_000_000_000)]
        {
            assert_eq!(size(text), Ok(expected), "{text}");
        }
        for text in ["", "GB", "1.5GB", "-1", "4 GB", "4TiB", "99999999999GB"] {
            assert!(size(text).is_err(), "{text}");
        }
    }
}
