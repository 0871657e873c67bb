//! A request's body. Enters: a request. Leaves: its bytes, bounded in number and in time. Knows nothing of what they say.

use std::sync::Arc;

use axum::body::{Body, Bytes};
use axum::extract::Request;
use axum::http::{StatusCode, header};
use http_body_util::BodyExt;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::error::ApiError;
use crate::limits::{BODY_TIME, LAST_WORDS, PASSED_OVER_BYTES, SMALL_BODY_BYTES};
use crate::stops::Stops;

/// A body, with its turn where it is no small one.
#[derive(Debug)]
pub(crate) struct Sent {
    pub(crate) bytes: Bytes,
    _turn: Option<OwnedSemaphorePermit>,
}

/// A body that is JSON, of at most `most` bytes, and comes in time; of large ones so many at once as there are `turns`. A type of
/// content that a page of another origin can send without asking is refused with all others.
///
/// # Errors
/// 415, 413, 400 for a body that was cut off, 408; 503 when the server stops before all of it is there.
pub(crate) async fn read_body(
    request: Request,
    most: usize,
    turns: &Arc<Semaphore>,
    stops: &Stops,
) -> Result<Sent, ApiError> {
    let (head, body) = request.into_parts();
    let of_header = |name| head.headers.get(name).and_then(|value: &header::HeaderValue| value.to_str().ok());
    let kind = of_header(header::CONTENT_TYPE).and_then(|kind| kind.split(';').next()).unwrap_or_default();
    if !kind.trim().eq_ignore_ascii_case("application/json") {
        let message = "the body must be JSON: send Content-Type: application/json";
        return Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, "not_json", message));
    }
    let length = of_header(header::CONTENT_LENGTH).and_then(|length| length.parse::<u64>().ok()).unwrap_or(0);
    // Who asks before it sends is told at once; who sends all the same reads no answer before it has sent.
    let is_asked = head.headers.contains_key(header::EXPECT);
    let passed_over = if is_asked { 0 } else { PASSED_OVER_BYTES };
    if length > most.saturating_add(passed_over) as u64 {
        return Err(too_large(most));
    }
    tokio::select! {
        biased;
        read = tokio::time::timeout(BODY_TIME, bounded(body, [most, passed_over], turns)) => read.unwrap_or_else(|_| {
            Err(ApiError::new(StatusCode::REQUEST_TIMEOUT, "body_timeout", "the body did not come in time"))
        }),
        () = stops.wait() => Err(ApiError::stopping()),
    }
}

/// All of a body. Of one that is too large `passed_over` bytes more are read and forgotten, as long as they come.
async fn bounded(mut body: Body, [most, passed_over]: [usize; 2], turns: &Arc<Semaphore>) -> Result<Sent, ApiError> {
    let (mut bytes, mut n_bytes, mut turn) = (Vec::new(), 0_usize, None);
    loop {
        let frame = match n_bytes > most {
            false => body.frame().await,
            true => tokio::time::timeout(LAST_WORDS, body.frame()).await.unwrap_or(None),
        };
        let Some(frame) = frame else { break };
        let cut_off = |_| ApiError::invalid(None, "the body was cut off, or is no chunked body");
        let data = frame.map_err(cut_off)?.into_data().unwrap_or_default();
        n_bytes = n_bytes.saturating_add(data.len());
        if n_bytes > SMALL_BODY_BYTES && turn.is_none() {
            turn = Some(turns.clone().acquire_owned().await.map_err(|_| ApiError::stopping())?);
        }
        if n_bytes <= most {
            bytes.extend_from_slice(&data);
        } else if n_bytes - most > passed_over {
            break;
        }
    }
    if n_bytes > most { Err(too_large(most)) } else { Ok(Sent { bytes: bytes.into(), _turn: turn }) }
}

fn too_large(most: usize) -> ApiError {
    let message = format!("the body has more than {most} bytes");
    ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "body_too_large", message)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run<T>(reading: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime").block_on(reading)
    }

    #[test]
    fn bodies_are_read_up_to_the_bound_and_passed_over_beyond() {
        let read = |n_bytes: usize| {
            let chunks = (0..n_bytes).map(|_| Ok::<_, std::io::Error>(Bytes::from_static(b"x")));
            let body = Body::from_stream(futures::stream::iter(chunks));
            run(bounded(body, [5, 3], &Arc::new(Semaphore::new(0)))).map(|sent| sent.bytes.len())
        };
        assert_eq!([0, 1, 5].map(|n| read(n).expect("it fits")), [0, 1, 5]);
        for n in [6, 8, 9, 1000] {
            assert_eq!(read(n).expect_err("too large").status, StatusCode::PAYLOAD_TOO_LARGE, "{n}");
        }
        let broken = futures::stream::iter([Ok(Bytes::from_static(b"x")), Err(std::io::Error::other("broken"))]);
        let error = run(bounded(Body::from_stream(broken), [5, 3], &Arc::new(Semaphore::new(0)))).expect_err("cut off");
        assert_eq!(error.status, StatusCode::BAD_REQUEST);
    }

    #[test]
    fn a_large_body_has_a_turn_and_waits_for_it() {
        let body = |n_bytes: usize| Body::from(vec![b'x'; n_bytes]);
        let turns = Arc::new(Semaphore::new(1));
        let most = [4 * SMALL_BODY_BYTES, 0];
        run(async {
            let small = bounded(body(SMALL_BODY_BYTES), most, &turns).await.expect("small");
            assert_eq!((small.bytes.len(), turns.available_permits()), (SMALL_BODY_BYTES, 1));
            let large = bounded(body(2 * SMALL_BODY_BYTES), most, &turns).await.expect("the first");
            let second = bounded(body(2 * SMALL_BODY_BYTES), most, &turns);
            let waited = tokio::time::timeout(std::time::Duration::from_millis(50), second).await;
            assert!(waited.is_err(), "the first is held");
            drop(large);
            bounded(body(2 * SMALL_BODY_BYTES), most, &turns).await.expect("the turn is free again");
        });
    }
}
