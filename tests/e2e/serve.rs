//! `wush serve`: what it answers is what `wush generate` writes and `wush eval` scores; under load, with clients that vanish or
//! misbehave, nothing is lost or left.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::thread::{scope, sleep};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use wush_tests::Scratch;

use crate::common::{args, assert_schema, model, on_demo, wush};
use crate::http::{JSON, Server, read};

/// Windows that leave most of a short sequence to the quantizer.
const WINDOWS: [&str; 6] = ["--sink", "4", "--keep", "32", "--flush", "8"];
/// Nothing is kept: the cache is empty when nobody waits.
const NO_PREFIXES: [&str; 2] = ["--prefixes", "0"];
const COMPLETIONS: &str = "/v1/completions";
const CHAT: &str = "/v1/chat/completions";

fn heldout() -> String {
    fs::read_to_string(model().join("heldout.txt")).expect("a text")
}

/// Prompts of very different lengths.
fn prompts() -> Vec<String> {
    let text = heldout();
    [5, 900, 60, 2500, 300, 17, 1200].iter().enumerate().map(|(i, n)| text[i * 700..i * 700 + n].to_owned()).collect()
}

/// A bundle of the demonstration model.
fn bundle(scratch: &Scratch) -> PathBuf {
    wush(scratch).ok(&on_demo("convert", &["--out", "b", "--feedback", "--center-keys", "always"]));
    scratch.join("b")
}

fn start(scratch: &Scratch, model: &Path, more: &[&str]) -> Server {
    let all = [args([&model.to_owned()]), more.iter().map(|&arg| arg.to_owned()).collect()].concat();
    Server::start(&wush(scratch), &all)
}

/// Options of a cache with `bits`.
fn cache(bits: &'static str) -> Vec<&'static str> {
    let windows = if bits == "16" { &[][..] } else { &WINDOWS[..] };
    [&["--kv-bits", bits, "--chunk", "64"], windows].concat()
}

fn greedy(prompt: impl Into<Value>, max_tokens: usize) -> Value {
    json!({ "prompt": prompt.into(), "max_tokens": max_tokens, "temperature": 0 })
}

fn with(mut body: Value, more: Value) -> Value {
    more.as_object().expect("fields").iter().for_each(|(key, value)| body[key] = value.clone());
    body
}

/// The text of a completion.
fn text(answer: &Value) -> &str {
    answer["choices"][0]["text"].as_str().unwrap_or_else(|| panic!("no text: {answer}"))
}

/// All pieces of a stream put together.
fn streamed(server: &Server, body: &Value) -> String {
    let events = server.stream(COMPLETIONS, &with(body.clone(), json!({ "stream": true })));
    events.map(|event| text(&event).to_owned()).collect()
}

#[test]
fn greedy_text_is_that_of_generate_at_every_width() {
    let scratch = Scratch::new();
    let bundle = bundle(&scratch);
    for bits in ["16", "2"] {
        let server = start(&scratch, &bundle, &cache(bits));
        for prompt in prompts() {
            let generate = [
                args([&"generate", &bundle, &"--prompt", &prompt.as_str(), &"--max-new-tokens", &"24"]),
                cache(bits).iter().map(|&arg| arg.to_owned()).collect(),
                args([&"--format", &"json"]),
            ]
            .concat();
            let expected = wush(&scratch).ok(&generate).json();
            let found = server.post(COMPLETIONS, &greedy(prompt.as_str(), 24)).ok();
            assert_eq!(text(&found), expected["text"], "{bits} bits, {prompt:?}");
            assert_eq!(found["usage"]["prompt_tokens"], expected["prompt"]["tokens"]);
            assert_eq!(found["usage"]["completion_tokens"], expected["generated"]["tokens"]);
            assert_eq!(streamed(&server, &greedy(prompt.as_str(), 24)), text(&found));
        }
        let report = server.stop();
        assert_schema("serve", &report);
        assert_eq!(report["requests"], 14);
    }
}

/// Log probabilities are compared as they are printed, every digit.
#[test]
fn a_text_in_company_is_the_text_alone() {
    let scratch = Scratch::new();
    let bundle = bundle(&scratch);
    let body = |i: usize, prompt: &String| {
        let drawn =
            json!({ "logprobs": 3, "ignore_eos": true, "temperature": if i % 3 == 2 { 0.9 } else { 0.0 }, "seed": i });
        with(greedy(prompt.as_str(), 20 + 7 * i), drawn)
    };
    for bits in ["16", "2"] {
        let server = start(&scratch, &bundle, &[&cache(bits)[..], &NO_PREFIXES].concat());
        let prompts = prompts();
        let ask = |i: usize| server.post(COMPLETIONS, &body(i, &prompts[i])).ok()["choices"].clone();
        let alone: Vec<Value> = (0..prompts.len()).map(ask).collect();
        let n_alone = server.metric("wush_decode_steps_total");
        let together: Vec<Value> = scope(|scope| {
            let late = |i: usize| {
                sleep(Duration::from_millis(15 * i as u64));
                ask(i)
            };
            let asked: Vec<_> = (0..prompts.len()).map(|i| scope.spawn(move || late(i))).collect();
            asked.into_iter().map(|thread| thread.join().expect("answered")).collect()
        });
        for (i, (alone, together)) in alone.iter().zip(&together).enumerate() {
            assert_eq!(alone, together, "{bits} bits, prompt {i}");
            assert_eq!(alone[0]["logprobs"]["tokens"].as_array().map(Vec::len), Some(20 + 7 * i));
        }
        let n_together = server.metric("wush_decode_steps_total") - n_alone;
        assert!(n_together < n_alone / 2.0, "{n_together} steps together, {n_alone} alone");
        // All in one request, too.
        let all = with(greedy(prompts.clone(), 12), json!({ "logprobs": 0 }));
        let all = server.post(COMPLETIONS, &all).ok();
        for (i, prompt) in prompts.iter().enumerate() {
            let one = server.post(COMPLETIONS, &with(greedy(prompt.as_str(), 12), json!({ "logprobs": 0 }))).ok();
            assert_eq!(with(one["choices"][0].clone(), json!({ "index": i })), all["choices"][i]);
        }
        server.stop();
    }
}

#[test]
fn a_reused_prefix_changes_no_digit() {
    let scratch = Scratch::new();
    let bundle = bundle(&scratch);
    let text = heldout();
    let prompts: Vec<String> =
        [0, 1, 2].iter().map(|i| format!("{}{}", &text[..1500], &text[3000 + i * 50..3100 + i * 90])).collect();
    for bits in ["16", "2"] {
        let ask = |server: &Server| {
            let body = |prompt: &String| with(greedy(prompt.as_str(), 16), json!({ "logprobs": 2 }));
            prompts.iter().map(|prompt| server.post(COMPLETIONS, &body(prompt)).ok()).collect::<Vec<_>>()
        };
        let fresh = start(&scratch, &bundle, &[&cache(bits)[..], &NO_PREFIXES].concat());
        let expected = ask(&fresh);
        assert_eq!(fresh.metric("wush_reused_prompt_tokens_total"), 0.0);
        fresh.stop();
        let server = start(&scratch, &bundle, &cache(bits));
        for (found, expected) in ask(&server).iter().zip(&expected) {
            assert_eq!(found["choices"], expected["choices"], "{bits} bits");
        }
        let cached =
            |answer: &Value| answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().expect("a count");
        let again = ask(&server);
        assert!(cached(&again[0]) >= 256 && cached(&again[0]).is_multiple_of(64), "{}", again[0]);
        assert!(server.metric("wush_reused_prompt_tokens_total") >= 512.0);
        assert!(server.metric("wush_cache_prefixes") > 0.0);
        let report = server.stop();
        assert!(report["reused_tokens"].as_u64() >= Some(512), "{report}");
    }
}

/// Mean NLL of two f32 forwards that sum in other orders, relative. Codes at 2 bits flip where a rounding decides, which
/// changes single tokens by more.
const NLL_REL_TOL_16: f64 = 1e-6;
const NLL_REL_TOL_2: f64 = 2e-3;

#[test]
fn an_echo_scores_tokens_as_eval_does() {
    let scratch = Scratch::new();
    let bundle = bundle(&scratch);
    let mut state = 3_u64;
    let mut next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 54) as u32
    };
    let lists: Vec<Vec<u32>> = (0..3).map(|_| (0..400).map(|_| next()).collect()).collect();
    let ids = scratch.write("ids.json", serde_json::to_string(&lists).expect("numbers"));
    let eval = args([&"eval", &"ppl", &bundle, &"--text", &ids, &"--bits", &"2", &"--format", &"json"]);
    let report = wush(&scratch).ok(&eval).json();
    // The study's windows and chunk, which are eval's.
    let protocol = ["--chunk", "16", "--sink", "16", "--keep", "128", "--flush", "16"];
    for (bits, tol) in [("16", NLL_REL_TOL_16), ("2", NLL_REL_TOL_2)] {
        let options = if bits == "16" { &protocol[..2] } else { &protocol[..] };
        let server = start(&scratch, &bundle, &[&["--kv-bits", bits], options].concat());
        // As lm-eval sends it.
        let body =
            json!({ "prompt": lists, "max_tokens": 1, "temperature": 0, "logprobs": 1, "echo": true, "seed": 1234 });
        let answer = server.post(COMPLETIONS, &body).ok();
        let (mut sum, mut n) = (0.0, 0);
        for (choice, ids) in answer["choices"].as_array().expect("choices").iter().zip(&lists) {
            let list = |name: &str| choice["logprobs"][name].as_array().unwrap_or_else(|| panic!("no {name}")).clone();
            let [tokens, logprobs, tops] = ["tokens", "token_logprobs", "top_logprobs"].map(list);
            assert_eq!([tokens.len(), logprobs.len(), tops.len()], [ids.len() + 1; 3]);
            assert!(logprobs[0].is_null() && tops[0].is_null());
            for (logprob, top) in logprobs.iter().zip(&tops).skip(1) {
                let largest =
                    top.as_object().expect("alternatives").values().filter_map(Value::as_f64).fold(f64::MIN, f64::max);
                assert!(logprob.as_f64().expect("a number") <= largest);
            }
            sum -= logprobs[1..ids.len()].iter().filter_map(Value::as_f64).sum::<f64>();
            n += ids.len() - 1;
        }
        let rows = report["rows"].as_array().expect("rows");
        let row = rows
            .iter()
            .find(|row| row["bits"].as_u64().map(|n| n.to_string()).as_deref() == Some(bits))
            .expect("a row");
        let expected = row["nll"].as_f64().expect("a number");
        let diff = (sum / n as f64 / expected - 1.0).abs();
        println!("{bits} bits: NLL {} here, {expected} by eval, {diff:.1e} apart", sum / n as f64);
        assert!(diff <= tol, "{bits} bits: {} {expected}", sum / n as f64);
        server.stop();
    }
}

#[test]
fn sixty_four_clients_some_of_whom_vanish_leave_nothing_behind() {
    let scratch = Scratch::new();
    let bundle = bundle(&scratch);
    let server = start(
        &scratch,
        &bundle,
        &[&cache("2")[..], &NO_PREFIXES, &["--max-running", "24", "--max-body", "100kB"]].concat(),
    );
    let text = heldout();
    let body = |i: usize| with(greedy(&text[i * 40..i * 40 + 30 + 20 * (i % 9)], 24), json!({ "ignore_eos": true }));
    let expected: Vec<String> =
        (0..64).map(|i| self::text(&server.post(COMPLETIONS, &body(i)).ok()).to_owned()).collect();
    scope(|scope| {
        let (server, body, expected) = (&server, &body, &expected);
        for i in 0..64 {
            scope.spawn(move || match i % 4 {
                // Vanishes after its first piece, or without a word.
                1 => drop(
                    server.stream(COMPLETIONS, &with(body(i), json!({ "stream": true, "max_tokens": 3000 }))).next(),
                ),
                2 if i % 8 == 2 => drop(server.send(
                    "POST",
                    COMPLETIONS,
                    JSON,
                    &with(body(i), json!({ "max_tokens": 3000 })).to_string(),
                )),
                3 if i % 8 == 3 => {
                    let large = format!("{{\"prompt\": \"{}\"}}", "a".repeat(200_000));
                    let refused = [("{", 400), ("{\"prompt\": 1}", 400), (&large, 413)]
                        .map(|(body, expected)| (server.request("POST", COMPLETIONS, JSON, body).status, expected));
                    assert!(refused.iter().all(|(found, expected)| found == expected), "{refused:?}");
                }
                _ => assert_eq!(streamed(server, &body(i)), expected[i], "client {i}"),
            });
        }
    });
    let clock = Instant::now();
    while server.metric("wush_running_sequences") + server.metric("wush_waiting_sequences") > 0.0 {
        assert!(clock.elapsed() < Duration::from_secs(60), "sequences are left");
        sleep(Duration::from_millis(20));
    }
    for kind in ["page_keys", "page_values", "window_keys", "window_values", "index"] {
        assert_eq!(server.metric(&format!("wush_cache_bytes{{kind=\"{kind}\"}}")), 0.0, "{kind}");
    }
    assert_eq!(server.metric("wush_cache_reserved_bytes"), 0.0);
    let report = server.stop();
    // Of those who left without a word some were gone before their request was read.
    assert!(report["cancelled"].as_u64().is_some_and(|n| (16..=24).contains(&n)), "{report}");
}

#[test]
fn what_cannot_be_served_is_said_in_openais_form() {
    let scratch = Scratch::new();
    let options = [
        "--api-key",
        "key-1",
        "--max-len",
        "300",
        "--max-body",
        "20kB",
        "--cache-memory",
        "2MB",
        "--model-name",
        "m",
        "--host",
        "localhost",
    ];
    let server = start(&scratch, &model(), &options);
    let key = format!("{JSON}Authorization: Bearer key-1\r\n");
    let long = vec![5; 301];
    let large = "a".repeat(21_000);
    for (method, path, headers, body, status, code) in [
        ("POST", COMPLETIONS, JSON, json!({ "prompt": "a" }), 401, "invalid_api_key"),
        ("POST", COMPLETIONS, "Authorization: Bearer key-2\r\n", json!({ "prompt": "a" }), 401, "invalid_api_key"),
        ("GET", "/metrics", "", json!({}), 401, "invalid_api_key"),
        ("POST", COMPLETIONS, "Authorization: Bearer key-1\r\n", json!({ "prompt": "a" }), 415, "not_json"),
        ("POST", COMPLETIONS, &key, json!([1]), 400, "invalid_value"),
        ("POST", COMPLETIONS, &key, json!({}), 400, "missing_required_parameter"),
        ("POST", COMPLETIONS, &key, json!({ "prompt": "a", "colour": 1 }), 400, "unknown_parameter"),
        ("POST", COMPLETIONS, &key, json!({ "prompt": "a", "n": 2 }), 400, "unsupported_value"),
        ("POST", COMPLETIONS, &key, json!({ "prompt": "" }), 400, "invalid_value"),
        ("POST", COMPLETIONS, &key, json!({ "prompt": [[]] }), 400, "invalid_value"),
        ("POST", COMPLETIONS, &key, json!({ "prompt": [4096] }), 400, "invalid_value"),
        ("POST", COMPLETIONS, &key, json!({ "prompt": vec!["a"; 129] }), 400, "invalid_value"),
        ("POST", COMPLETIONS, &key, json!({ "prompt": long }), 400, "context_length_exceeded"),
        ("POST", COMPLETIONS, &key, json!({ "prompt": "a", "max_tokens": 300 }), 400, "context_length_exceeded"),
        ("POST", COMPLETIONS, &key, json!({ "prompt": "a", "max_tokens": 299 }), 400, "cache_exceeded"),
        ("POST", COMPLETIONS, &key, json!({ "prompt": large }), 413, "body_too_large"),
        ("POST", COMPLETIONS, &key, json!({ "prompt": "a", "model": "other" }), 404, "model_not_found"),
        ("POST", CHAT, &key, json!({ "messages": [{ "role": "user", "content": "a" }] }), 400, "no_chat_template"),
        ("GET", "/v1/models/other", &key, json!({}), 404, "model_not_found"),
        ("GET", COMPLETIONS, &key, json!({}), 405, "method_not_allowed"),
        ("POST", "/v1/embeddings", &key, json!({}), 404, "not_found"),
    ] {
        let answer = server.request(method, path, headers, &body.to_string());
        assert_eq!((answer.status, answer.code().as_str()), (status, code), "{method} {path} {body:.80}: {answer:?}");
        let error = &answer.json()["error"];
        assert!(error["message"].is_string() && error["type"].is_string() && error.get("param").is_some(), "{error}");
    }
    // A body of no stated length is bounded as well.
    let mut chunked = server.connect();
    let head = format!(
        "POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{key}Transfer-Encoding: chunked\r\n\r\n"
    );
    let _ = chunked.write_all(format!("{head}{:x}\r\n{large}\r\n", large.len()).as_bytes());
    assert_eq!(read(chunked).status, 413);
    assert_eq!(server.get("/health").ok(), json!({ "status": "ok" }));
    let models = server.request("GET", "/v1/models", &key, "").ok();
    assert_eq!((&models["data"][0]["id"], &models["data"][0]["max_model_len"]), (&json!("m"), &json!(300)));
    assert!(models["data"][0]["created"].as_u64() > Some(1_700_000_000), "{models}");
    assert_eq!(server.request("GET", "/v1/models/m", &key, "").ok(), models["data"][0]);
    assert_eq!(server.request("POST", COMPLETIONS, &key, &greedy("The", 5).to_string()).status, 200);
    server.stop();
}

#[test]
fn more_than_can_wait_is_refused_at_once() {
    let scratch = Scratch::new();
    let server = start(&scratch, &model(), &["--max-running", "1", "--max-waiting", "1"]);
    let endless = with(greedy("The", 3000), json!({ "ignore_eos": true, "stream": true }));
    let mut running = server.stream(COMPLETIONS, &endless);
    running.next().expect("it runs");
    let waiting = server.send("POST", COMPLETIONS, JSON, &greedy("The", 2).to_string());
    let clock = Instant::now();
    while server.metric("wush_waiting_sequences") < 1.0 {
        assert!(clock.elapsed() < Duration::from_secs(60));
        sleep(Duration::from_millis(10));
    }
    let refused = server.post(COMPLETIONS, &greedy("The", 2));
    assert_eq!((refused.status, refused.code().as_str()), (429, "queue_full"));
    assert!(refused.head.to_ascii_lowercase().contains("retry-after: 1"), "{refused:?}");
    let too_many = server.post(COMPLETIONS, &greedy(vec!["a"; 3], 2));
    assert_eq!((too_many.status, too_many.code().as_str()), (400, "invalid_value"));
    // Who ran went away: who waited is served.
    drop(running);
    assert_eq!(read(waiting).status, 200);
    assert_eq!(server.stop()["cancelled"], 1);
}

#[test]
fn a_stop_lets_requests_end_or_tells_them() {
    let scratch = Scratch::new();
    let server = start(&scratch, &model(), &["--grace", "100", "--max-running", "1"]);
    let body = with(
        greedy("The river", 200),
        json!({ "ignore_eos": true, "stream": true, "stream_options": { "include_usage": true } }),
    );
    let mut events = server.stream(COMPLETIONS, &body);
    events.next().expect("it runs");
    let waiting = server.send("POST", COMPLETIONS, JSON, &greedy("The", 2).to_string());
    while server.metric("wush_waiting_sequences") < 1.0 {
        sleep(Duration::from_millis(10));
    }
    server.signal("TERM");
    assert_eq!(read(waiting).code(), "stopping", "what waits is told at once");
    let last = events.last().expect("events");
    assert_eq!(last["usage"]["completion_tokens"], 200, "{last}");
    let run = server.wait();
    assert_eq!(run.code, Some(0), "{run:?}");
    assert_eq!(run.json()["cache_bytes_left"], 0);

    let server = start(&scratch, &model(), &["--grace", "0"]);
    let endless = with(greedy("The river", 4000), json!({ "ignore_eos": true }));
    let mut events = server.stream(COMPLETIONS, &with(endless.clone(), json!({ "stream": true })));
    events.next().expect("it runs");
    let whole = server.send("POST", COMPLETIONS, JSON, &endless.to_string());
    while server.metric("wush_running_sequences") < 2.0 {
        sleep(Duration::from_millis(10));
    }
    let clock = Instant::now();
    server.signal("TERM");
    assert_eq!(events.last().expect("events")["error"]["code"], "stopping");
    let whole = read(whole);
    assert_eq!((whole.status, whole.code().as_str()), (503, "stopping"));
    let run = server.wait();
    assert_eq!((run.code, run.json()["cache_bytes_left"].as_u64()), (Some(0), Some(0)), "{run:?}");
    assert!(clock.elapsed() < Duration::from_secs(30), "{:?}", clock.elapsed());
}

#[test]
fn chats_are_those_of_generate_and_stop_strings_end_texts() {
    let scratch = Scratch::new();
    let chat = scratch.copy_of(&model(), "chat");
    let template = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:";
    fs::write(chat.join("chat_template.jinja"), template).expect("written");
    let server = start(&scratch, &chat, &[]);
    let generate = args([
        &"generate",
        &chat,
        &"--prompt",
        &"Who came?",
        &"--system",
        &"Be brief",
        &"--max-new-tokens",
        &"30",
        &"--format",
        &"json",
    ]);
    let expected = wush(&scratch).ok(&generate).json();
    let messages = json!([{ "role": "system", "content": "Be brief" }, { "role": "user", "content": [{ "type": "text", "text": "Who came?" }] }]);
    let body = json!({ "messages": messages, "max_tokens": 30, "temperature": 0, "logprobs": true, "top_logprobs": 2 });
    let found = server.post(CHAT, &body).ok();
    let content = found["choices"][0]["message"]["content"].as_str().expect("a text");
    assert_eq!(content, expected["text"]);
    assert_eq!(found["choices"][0]["logprobs"]["content"][0]["top_logprobs"].as_array().map(Vec::len), Some(2));
    let pieces: String = server
        .stream(CHAT, &with(body.clone(), json!({ "stream": true })))
        .filter_map(|event| Some(event["choices"][0]["delta"]["content"].as_str()?.to_owned()))
        .collect();
    assert_eq!(pieces, content);

    let whole = text(&server.post(COMPLETIONS, &greedy("The river", 40)).ok()).to_owned();
    let stop: String = whole.chars().skip(30).take(6).collect();
    let body = with(greedy("The river", 40), json!({ "stop": [stop, "never to be seen"], "logprobs": 0 }));
    let stopped = server.post(COMPLETIONS, &body).ok();
    let before = whole.split_once(&stop).expect("it is there").0;
    assert_eq!((text(&stopped), &stopped["choices"][0]["finish_reason"]), (before, &json!("stop")));
    assert_eq!(streamed(&server, &body), before);
    let echoed = server.post(COMPLETIONS, &with(greedy("The river", 40), json!({ "echo": true }))).ok();
    assert_eq!(text(&echoed), format!("The river{whole}"));
    server.stop();
}
