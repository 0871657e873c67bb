//! Errors: of the server ([`ServeError`], which ends it) and of a request ([`ApiError`], which is told in OpenAI's form).

use std::net::SocketAddr;

use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::json;
use wush_generate::GenerateError;

/// Result of this crate.
pub type Result<T, E = ServeError> = std::result::Result<T, E>;

/// Why a server did not start, or did not end well.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// The address cannot be listened on.
    #[error("{address}: cannot listen: {source}")]
    Bind {
        /// As asked for.
        address: SocketAddr,
        /// The system's reason.
        source: std::io::Error,
    },
    /// The system gives no threads or no timers.
    #[error("cannot start the server's threads: {0}")]
    Threads(std::io::Error),
    /// The decoder or the cache.
    #[error(transparent)]
    Generate(#[from] GenerateError),
    /// A bug: the thread that computes panicked.
    #[error("the engine's thread panicked")]
    Panicked,
}

impl ServeError {
    /// The remedy, as a line of its own.
    pub fn hint(&self) -> Option<String> {
        match self {
            Self::Bind { source, .. } if source.kind() == std::io::ErrorKind::AddrInUse => {
                Some("another program listens there: choose another --port, or 0 for any that is free".to_owned())
            }
            Self::Bind { .. } => Some("choose an address of this machine with --host, and a --port".to_owned()),
            Self::Threads(_) => Some("raise the limits on processes and open files (ulimit -u, ulimit -n)".to_owned()),
            Self::Generate(source) => source.hint(),
            Self::Panicked => None,
        }
    }
}

/// Why a request was not served, as the client is told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ApiError {
    pub(crate) status: StatusCode,
    /// OpenAI's `type`.
    pub(crate) kind: &'static str,
    /// OpenAI's `code`.
    pub(crate) code: &'static str,
    /// The field at fault.
    pub(crate) param: Option<String>,
    pub(crate) message: String,
}

impl ApiError {
    /// 400: a field, or the whole body, is not what it must be.
    pub(crate) fn invalid(param: impl Into<Option<&'static str>>, message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "invalid_value", message).at(param.into().map(str::to_owned))
    }

    /// Any other error of the client's.
    pub(crate) fn new(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        let kind = match status {
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            status if status.is_server_error() => "server_error",
            _ => "invalid_request_error",
        };
        Self { status, kind, code, param: None, message: message.into() }
    }

    pub(crate) fn at(self, param: Option<String>) -> Self {
        Self { param, ..self }
    }

    /// 503: the server was asked to stop.
    pub(crate) fn stopping() -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, "stopping", "the server is stopping")
    }

    /// 500.
    pub(crate) fn internal(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, "internal_error", message)
    }

    /// OpenAI's error object.
    pub(crate) fn body(&self) -> serde_json::Value {
        let Self { kind, code, param, message, .. } = self;
        json!({ "error": { "message": message, "type": kind, "param": param, "code": code } })
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let json = [(header::CONTENT_TYPE, "application/json")];
        let mut response = (self.status, json, self.body().to_string()).into_response();
        let extra = match self.status {
            StatusCode::UNAUTHORIZED => Some((header::WWW_AUTHENTICATE, "Bearer")),
            StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => Some((header::RETRY_AFTER, "1")),
            _ => None,
        };
        if let Some((name, value)) = extra {
            response.headers_mut().insert(name, header::HeaderValue::from_static(value));
        }
        response
    }
}
