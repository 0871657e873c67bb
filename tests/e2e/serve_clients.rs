//! `wush serve` and clients that are not as they should be: that vanish, read nothing, send half of a request, or too much. And
//! what is said of single tokens, wherever a text is cut.

use std::io::Write;
use std::net::{Shutdown, TcpStream};
use std::thread::sleep;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use wush_tests::Scratch;

use crate::common::{args, model, wush};
use crate::http::{JSON, Server, read};

const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";
/// Tokens of a text that takes longer than any test waits for a client to be noticed.
const MANY: usize = 4000;

fn start(scratch: &Scratch, more: &[&str]) -> Server {
    let all = [args([&model()]), more.iter().map(|&arg| arg.to_owned()).collect()].concat();
    Server::start(&wush(scratch), &all)
}

fn endless() -> Value {
    json!({ "prompt": "The", "max_tokens": MANY, "temperature": 0, "ignore_eos": true })
}

fn requests(endpoint: &str, status: &str, outcome: &str) -> String {
    format!("wush_requests_total{{endpoint=\"{endpoint}\",status=\"{status}\",outcome=\"{outcome}\"}}")
}

/// A request of a connection that is kept open.
fn kept(body: &Value) -> String {
    let body = body.to_string();
    format!("POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\n{JSON}Content-Length: {}\r\n\r\n{body}", body.len())
}

fn write(mut stream: &TcpStream, text: &str) {
    stream.write_all(text.as_bytes()).expect("sent");
}

#[test]
fn who_vanishes_is_noticed_with_all_that_was_sent() {
    let scratch = Scratch::new();
    let server = start(&scratch, &["--prefixes", "0"]);
    // Whole answers of one request, of several on one connection, and of as many as no buffer holds; then a stream.
    for n_requests in [1, 5, 2000] {
        let client = server.connect();
        let all = kept(&endless()).repeat(n_requests);
        client.set_write_timeout(Some(Duration::from_secs(1))).expect("set");
        let _ = (&client).write_all(all.as_bytes());
        server.wait_for("wush_running_sequences", 1.0);
        drop(client);
        server.wait_for("wush_running_sequences", 0.0);
        sleep(Duration::from_millis(300));
        assert_eq!(server.metric("wush_running_sequences"), 0.0, "{n_requests} requests");
    }
    server.wait_for(&requests("completions", "none", "cancelled"), 3.0);
    let mut body = endless();
    body["stream"] = json!(true);
    server.stream(COMPLETIONS, &body).next().expect("it runs");
    server.wait_for(&requests("completions", "200", "cancelled"), 1.0);
    assert!(server.metric("wush_generated_tokens_total") < MANY as f64, "none ran to its end");
    assert_eq!(server.stop()["cancelled"], 4);
}

#[test]
fn who_only_stops_sending_is_answered() {
    let scratch = Scratch::new();
    let server = start(&scratch, &[]);
    for n_tokens in [1, 600] {
        let body = json!({ "prompt": "The", "max_tokens": n_tokens, "ignore_eos": true });
        let client = server.send("POST", COMPLETIONS, JSON, &body.to_string());
        client.shutdown(Shutdown::Write).expect("shut");
        assert_eq!(read(client).ok()["usage"]["completion_tokens"], n_tokens);
    }
    server.wait_for(&requests("completions", "200", "answered"), 2.0);
    // What is no HTTP is counted as well.
    let client = server.connect();
    write(&client, "one two\r\n\r\n");
    assert_eq!(read(client).status, 400);
    server.wait_for(&requests("none", "400", "answered"), 1.0);
    server.stop();
}

#[test]
fn who_neither_reads_nor_writes_does_not_delay_the_end() {
    let scratch = Scratch::new();
    let server = start(&scratch, &["--grace", "300"]);
    // An answer of several megabytes, of which nothing is read.
    let lists: Vec<Vec<usize>> = (0..10).map(|i| (0..1000).map(|j| (i * 37 + j * 11) % 4000 + 5).collect()).collect();
    let body = json!({ "prompt": lists, "max_tokens": 0, "echo": true, "logprobs": 20 });
    let unread = server.send("POST", COMPLETIONS, JSON, &body.to_string());
    server.wait_for(&requests("completions", "200", "answered"), 1.0);
    // Half of a head, and half of a body.
    let half_head = server.connect();
    write(&half_head, "POST /v1/comp");
    let half_body = server.connect();
    write(&half_body, &format!("POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\n{JSON}Content-Length: 100\r\n\r\n{{\"pro"));
    sleep(Duration::from_millis(200));
    let clock = Instant::now();
    server.signal("TERM");
    let refused = read(half_body);
    assert_eq!((refused.status, refused.code().as_str()), (503, "stopping"));
    let run = server.wait();
    assert_eq!((run.code, run.json()["cache_bytes_left"].as_u64()), (Some(0), Some(0)), "{run:?}");
    assert!(clock.elapsed() < Duration::from_secs(60), "{:?}", clock.elapsed());
    drop((unread, half_head));
}

/// The tokens of an answer's first text: what each says, and where in the text it begins.
fn tokens(choice: &Value) -> Vec<(String, usize)> {
    let list =
        |name: &str| choice["logprobs"][name].as_array().unwrap_or_else(|| panic!("no {name}: {choice}")).clone();
    let offset = |offset: Value| offset.as_u64().and_then(|offset| usize::try_from(offset).ok()).expect("an offset");
    let token = |token: &Value| token.as_str().expect("a text").to_owned();
    list("tokens").iter().map(token).zip(list("text_offset").into_iter().map(offset)).collect()
}

#[test]
fn tokens_begin_where_they_are_said_to() {
    let scratch = Scratch::new();
    let server = start(&scratch, &[]);
    let end = "<|endoftext|>";
    for prompt in [
        json!("The river"),
        json!(format!("One.{end}{end} Caf\u{e9} \u{1f389} lights")),
        // The tokenizer composes it, so its tokens say another text than was sent.
        json!("cafe\u{301}s and cafe\u{301}s by the river"),
        json!([5, 300, 0, 77, 0, 0, 301]),
        json!([0]),
    ] {
        let body = json!({ "prompt": prompt, "max_tokens": 12, "temperature": 0, "echo": true, "logprobs": 0, "ignore_eos": true });
        let answer = server.post(COMPLETIONS, &body).ok();
        let text = answer["choices"][0]["text"].as_str().expect("a text");
        let tokens = tokens(&answer["choices"][0]);
        assert_eq!(answer["usage"]["total_tokens"], tokens.len());
        let mut after = 0;
        for (token, offset) in &tokens {
            assert!(*offset >= after || token.starts_with("token_id:"), "{prompt}: {tokens:?}");
            let rest: String = text.chars().skip(*offset).collect();
            let is_there = rest.starts_with(token.as_str());
            // An end of text that the model writes is no text.
            assert!(
                is_there || token == end || token.starts_with("token_id:"),
                "{prompt}: {token:?} at {offset} of {text:?}"
            );
            after = if is_there { offset + token.chars().count() } else { *offset };
        }
        assert_eq!(after, text.chars().count(), "{prompt}: tokens reach to the end");
    }
    server.stop();
}

#[test]
fn nothing_is_said_of_tokens_that_a_stop_string_cuts_off() {
    let scratch = Scratch::new();
    let server = start(&scratch, &[]);
    let body = json!({ "prompt": "The river", "max_tokens": 40, "temperature": 0, "logprobs": 0 });
    let whole = server.post(COMPLETIONS, &body).ok()["choices"][0].clone();
    let text = whole["text"].as_str().expect("a text").to_owned();
    let all = tokens(&whole);
    for at in [0, 1, 17, 30, 31, 32] {
        let stop: String = text.chars().skip(at).take(9).collect();
        let n_before = text.split_once(&stop).expect("it is there").0.chars().count();
        let expected: Vec<_> = all.iter().filter(|(_, offset)| *offset < n_before).cloned().collect();
        let mut body = body.clone();
        body["stop"] = json!([stop, "never to be seen"]);
        let answer = server.post(COMPLETIONS, &body).ok();
        assert_eq!(tokens(&answer["choices"][0]), expected, "before {stop:?}");
        body["stream"] = json!(true);
        let events: Vec<Value> = server.stream(COMPLETIONS, &body).collect();
        let streamed: Vec<_> = events.iter().flat_map(|event| tokens(&event["choices"][0])).collect();
        assert_eq!(streamed, expected, "before {stop:?}");
        let mut told = String::new();
        for event in &events {
            told += event["choices"][0]["text"].as_str().expect("a text");
            let n_told = told.chars().count();
            assert!(
                tokens(&event["choices"][0]).iter().all(|(_, offset)| *offset < n_told),
                "of text that is held back"
            );
        }
    }
    // A stop string that does not come takes nothing away.
    let mut body = body.clone();
    body["stop"] = json!("never to be seen");
    assert_eq!(tokens(&server.post(COMPLETIONS, &body).ok()["choices"][0]), all);
    // It was no client who went away.
    assert_eq!(server.stop()["cancelled"], 0);
}

/// A client that sends all before it reads, as most do, learns why it is refused; one that asks first need not send.
#[test]
fn who_sends_too_much_is_told_so() {
    let scratch = Scratch::new();
    let server = start(&scratch, &["--max-body", "50kB"]);
    let body = json!({ "prompt": "a".repeat(9_000_000) }).to_string();
    let client = server.connect();
    write(
        &client,
        &format!(
            "POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{JSON}Content-Length: {}\r\n\r\n",
            body.len()
        ),
    );
    write(&client, &body);
    let refused = read(client);
    assert_eq!((refused.status, refused.code().as_str()), (413, "body_too_large"));
    for n in [60_000_u64, 1 << 60] {
        let client = server.connect();
        let expect = format!("Connection: close\r\n{JSON}Content-Length: {n}\r\nExpect: 100-continue\r\n\r\n");
        write(&client, &format!("POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\n{expect}"));
        assert_eq!(read(client).status, 413);
    }
    server.stop();
}

/// Memory that a refused prompt of 3.75 MB may take: some copies of it, and a piece of it as tokens. All of it as tokens takes
/// four times as much.
const REFUSAL_BYTES: u64 = 120_000_000;

#[test]
fn a_prompt_that_cannot_fit_takes_no_memory() {
    let scratch = Scratch::new();
    let chat = scratch.copy_of(&model(), "chat");
    std::fs::write(chat.join("chat_template.jinja"), "{{ messages[0].content }}").expect("written");
    let server = Server::start(&wush(&scratch), &args([&chat]));
    server.post(COMPLETIONS, &json!({ "prompt": "The" })).ok();
    let before = server.peak_memory();
    let long = "The river ran. ".repeat(250_000);
    let messages = json!([{ "role": "user", "content": long }]);
    for (path, body, param) in
        [(COMPLETIONS, json!({ "prompt": long }), "prompt"), (CHAT, json!({ "messages": messages }), "messages")]
    {
        let refused = server.post(path, &body);
        assert_eq!((refused.status, refused.code().as_str()), (400, "context_length_exceeded"));
        let error = &refused.json()["error"];
        assert_eq!(error["param"], param);
        assert!(error["message"].as_str().is_some_and(|message| message.contains(param)), "{error}");
    }
    if let (Some(before), Some(after)) = (before, server.peak_memory()) {
        assert!(after - before <= REFUSAL_BYTES, "{before} bytes before, {after} after");
    }
    server.stop();
}

/// Prompt and answer together are what `max_model_len` and `--max-len` say, as of other servers.
#[test]
fn prompt_and_answer_have_the_bound_together() {
    let scratch = Scratch::new();
    for (options, longest) in [(&["--max-len", "50"][..], 50), (&[], 4096)] {
        let server = start(&scratch, options);
        assert_eq!(server.get("/v1/models").ok()["data"][0]["max_model_len"], longest);
        for (n_prompt, n_new, expected) in
            [(longest - 1, 1, 200), (longest - 1, 2, 400), (longest, 0, 200), (longest, 1, 400), (longest + 1, 0, 400)]
        {
            let body = json!({ "prompt": vec![7; n_prompt], "max_tokens": n_new, "ignore_eos": true });
            assert_eq!(server.post(COMPLETIONS, &body).status, expected, "{n_prompt} and {n_new} of {longest}");
        }
        server.stop();
    }
}
