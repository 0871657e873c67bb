//! Reports as text for people: a few lines, one table, and the next command to run.

use std::fmt::Write;
use std::time::Duration;

use serde::Serialize;
use wush_pipeline::card::geometric_mean;
use wush_pipeline::manifest::{Calibration, HeadReport, LayerReport, Solve};
use wush_pipeline::report::{
    AllottedBits, CacheUse, CalibrateReport, ConvertReport, DemoReport, EvalPplReport, EvalReconReport, ExportReport,
    ExportedLayer, Gain, GenerateReport, Layers, MergeReport, PerplexityRow, Rate, ReconRow, ServeReport, Serves,
    SolveReport, UnfoldReport, Verdict, WrittenDir, WrittenFile,
};
use wush_pipeline::request::Protocol;
use wush_pipeline::{
    BenchCalibrateReport, BenchKernelsReport, CeilingsReport, DeviceReport, DoctorReport, KernelRow, SequenceRow,
    StageRow, counted, describe_allotment, describe_bits, describe_gain, describe_solve, describe_solves, human_bits,
    human_bytes, human_time, printable, ratio, shell_word,
};

/// A report that the program can print.
pub trait Report: Serialize {
    /// For people; ends with a newline.
    fn text(&self) -> String;

    /// Whether all checks passed.
    fn passed(&self) -> bool {
        true
    }
}

impl Report for CalibrateReport {
    fn text(&self) -> String {
        let mut text = Lines::default();
        text.row("model", &format!("{} ({}, {} layers)", self.model.id, self.model.family, self.model.n_layers));
        text.calibration(Some(&self.calibration));
        if let Some(shard) = &self.shard {
            text.row("shard", shard);
        }
        text.row("time", &rated(self.seconds, self.calibration.tokens));
        for gpu in &self.gpus {
            let [peak, planned] = [gpu.peak, gpu.planned].map(human_bytes);
            let host = pinned(gpu.layers, gpu.pinned);
            text.row("GPU", &format!("{}, {peak} at most of {planned} planned{host}", gpu.device));
        }
        text.file(&self.out);
        text.notes(&self.notes);
        let path = shell_word(&self.out.path);
        match &self.shard {
            Some(_) => text.next(&format!("wush merge {path} OTHERS… --out stats.safetensors")),
            None => text.next(&format!("wush solve {path} --out transforms.safetensors")),
        }
        text.0
    }
}

impl Report for MergeReport {
    fn text(&self) -> String {
        let mut text = Lines::default();
        text.row("model", &self.model_id);
        text.row("merged", &counted(self.inputs, "file"));
        text.calibration(Some(&self.calibration));
        text.file(&self.out);
        text.notes(&self.notes);
        text.next(&format!("wush solve {} --out transforms.safetensors", shell_word(&self.out.path)));
        text.0
    }
}

impl Report for SolveReport {
    fn text(&self) -> String {
        let mut text = Lines::default();
        text.row("model", &self.model_id);
        text.solve(&self.solve);
        text.calibration(Some(&self.calibration));
        text.row("time", &human_time(Duration::from_secs_f64(self.seconds)));
        text.file(&self.out);
        text.notes(&self.notes);
        text.layers(&self.layers);
        text.next(&format!("wush fold MODEL {} --calib TEXT --out BUNDLE", shell_word(&self.out.path)));
        text.0
    }
}

impl Report for ConvertReport {
    fn text(&self) -> String {
        let mut text = Lines::default();
        text.conversion(self);
        text.layers(&self.layers);
        match self.verdict {
            Verdict::Ok => text.next(&audit_command(self)),
            Verdict::Failed => text.failed(&self.out),
        }
        text.0
    }

    fn passed(&self) -> bool {
        self.verdict == Verdict::Ok
    }
}

impl Report for UnfoldReport {
    fn text(&self) -> String {
        let mut text = Lines::default();
        text.row("source", &self.source_id);
        let same = if self.source_hash == self.unfolded_hash { "bit for bit" } else { "up to rounding" };
        text.row("weights", &format!("the source's {same}"));
        text.row("verdict", "not compared with the source: `wush inspect --base` does that");
        text.row("time", &human_time(Duration::from_secs_f64(self.seconds)));
        text.dir(&self.out);
        text.notes(&self.notes);
        text.next(&format!("wush inspect {} --base MODEL", shell_word(&self.out.path)));
        text.0
    }
}

impl Report for ExportReport {
    fn text(&self) -> String {
        let export = &self.export;
        let mut text = Lines::default();
        text.solve(&export.solve);
        text.row("format", &format!("{}, format_version {}", export.format, export.format_version));
        text.row("layers", &heads_of(&export.layers));
        let error = |of: fn(&ExportedLayer) -> f64| export.layers.iter().map(of).fold(0.0, f64::max);
        let rotated = |error: f64| format!("rotated, R Rᵀ = I within {error:.1e}");
        text.row("keys", &rotated(error(|layer| layer.key_error)));
        let (values, model, path) = match export.serves {
            Serves::Bundle => {
                ("left as they are: the bundle's weights hold their transform".to_owned(), "the bundle", "BUNDLE")
            }
            Serves::Source => {
                let model = "the checkpoint that the transforms were solved for";
                (rotated(error(|layer| layer.value_error)), model, "MODEL")
            }
        };
        text.row("values", &values);
        text.row("serves", &format!("{model}, weights {}", export.model_hash));
        text.dir(&self.out);
        text.notes(&self.notes);
        let [key, value] = [0, 1].map(|i| shell_word(&format!("{}/{}", self.out.path, export.files[i].path)));
        text.next(&format!(
            "SGLANG_OSCAR_K_ROTATION_PATH={key} SGLANG_OSCAR_V_ROTATION_PATH={value} python -m sglang.launch_server \
             --model-path {path} --kv-cache-dtype int2 (docs/serving.md has OSCAR's other variables)"
        ));
        text.0
    }
}

impl Report for wush_pipeline::audit::Report {
    fn text(&self) -> String {
        wush_pipeline::audit::to_text(self)
    }

    fn passed(&self) -> bool {
        self.verdict == wush_pipeline::audit::Verdict::Ok
    }
}

impl Report for EvalPplReport {
    fn text(&self) -> String {
        let mut text = Lines::default();
        text.row("model", &format!("{} ({}, {} layers)", self.model.id, self.model.family, self.model.n_layers));
        let windows = counted(self.sequences, "window");
        text.row("text", &format!("{}: {windows} of up to {} tokens", self.text, self.seq_len));
        let Protocol { chunk, sink, keep, flush } = self.protocol;
        let scales = &self.scale_dtype;
        text.row("cache", &format!("chunks of {chunk}, sink {sink}, keep {keep}, flush {flush}; scales in {scales}"));
        text.row("device", &self.device);
        describe_solves(&self.solves).iter().for_each(|how| text.row("solve", how));
        text.calibration(self.calibration.as_ref());
        text.row("time", &human_time(Duration::from_secs_f64(self.seconds)));
        text.notes(&self.notes);
        let _ = writeln!(
            text.0,
            "\n{:<16} {:<14} {:>4} {:>12} {:>10}",
            "transform", "quantizer", "bits", "perplexity", "nll"
        );
        for row in &self.rows {
            let PerplexityRow { transform, quantizer, bits, ppl, nll, .. } = row;
            let _ =
                writeln!(text.0, "{transform:<16} {quantizer:<14} {:>4} {ppl:>12.4} {nll:>10.5}", human_bits(*bits));
        }
        self.rows.iter().for_each(|row| text.allotment(&row.transform, (row.bits, row.asked_bits), &row.allotment));
        text.0
    }
}

impl Report for EvalReconReport {
    fn text(&self) -> String {
        let mut text = Lines::default();
        text.row("model", &format!("{} ({}, {} layers)", self.model.id, self.model.family, self.model.n_layers));
        let sequences = counted(self.sequences, "sequence");
        text.row("text", &format!("{}: {sequences} of up to {} tokens", self.text, self.seq_len));
        text.row("cache", &format!("every token quantized; scales in {}", self.scale_dtype));
        describe_solves(&self.solves).iter().for_each(|how| text.row("solve", how));
        text.calibration(self.calibration.as_ref());
        text.row("time", &human_time(Duration::from_secs_f64(self.seconds)));
        text.notes(&self.notes);
        let _ = writeln!(
            text.0,
            "\n{:<16} {:<14} {:>4} {:>10} {:>13} {:>10} {:>10} {:>10}",
            "transform", "quantizer", "bits", "products", "probabilities", "keys", "values", "both"
        );
        for row in &self.rows {
            let ReconRow { transform, quantizer, bits, products, probabilities, keys, values, both, .. } = row;
            let _ = writeln!(
                text.0,
                "{transform:<16} {quantizer:<14} {:>4} {products:>10.4} {probabilities:>13.4} {keys:>10.4} {values:>10.4} \
                 {both:>10.4}",
                human_bits(*bits)
            );
        }
        self.rows.iter().for_each(|row| text.allotment(&row.transform, (row.bits, row.asked_bits), &row.allotment));
        text.0.push_str(
            "Relative squared errors, geometric means over layers; the last three are of module outputs, with keys, values and \
             both quantized.\n",
        );
        text.0
    }
}

impl Report for GenerateReport {
    fn text(&self) -> String {
        let mut text = Lines::default();
        let _ = writeln!(text.0, "{:<12} {:>8} {:>10} {:>10}", "", "tokens", "time", "tokens/s");
        for (name, rate) in [("prompt", &self.prompt), ("generated", &self.generated)] {
            let Rate { tokens, seconds, tokens_per_second } = rate;
            let _ = writeln!(text.0, "{name:<12} {tokens:>8} {seconds:>8.2} s {tokens_per_second:>10.1}");
        }
        text.row("stopped", self.stop.reason());
        text.row("cache", &describe_cache(&self.cache));
        if self.cache.quantizer.is_some() && self.cache.packed_bytes == 0 {
            let CacheUse { sink, keep, .. } = self.cache;
            let exact = format!("the first {sink} and the newest {keep} tokens stay exact, and there were no more");
            text.row("", &format!("nothing was quantized: {exact}"));
        }
        text.allotment("cache", (self.cache.bits, None), &self.cache.allotment);
        text.0
    }
}

impl Report for ServeReport {
    fn text(&self) -> String {
        let mut text = Lines::default();
        text.row("model", &format!("{} ({}, {} layers)", self.model.id, self.model.family, self.model.n_layers));
        text.row(
            "served",
            &format!("{} in {}", counted(self.requests, "request"), human_time(Duration::from_secs_f64(self.seconds))),
        );
        let reused = counted(self.reused_tokens, "token");
        text.row("prompts", &format!("{} computed, {reused} reused", counted(self.prompt_tokens, "token")));
        let cancelled = counted(self.cancelled, "text");
        text.row("answers", &format!("{}, {cancelled} given up by clients", counted(self.generated_tokens, "token")));
        text.0
    }

    /// A cache that is not empty at the end is a bug.
    fn passed(&self) -> bool {
        self.cache_bytes_left == 0
    }
}

/// "2 bits (quest, transformed): 1.2 MB for 700 tokens, 0.21 of BF16's 5.6 MB".
fn describe_cache(cache: &CacheUse) -> String {
    let how = match (&cache.quantizer, cache.transforms) {
        (None, _) => "not quantized, f32".to_owned(),
        (Some(quantizer), true) => format!("{quantizer}, transformed keys and values"),
        (Some(quantizer), false) => format!("{quantizer}, no transforms"),
    };
    let packed = match cache.quantizer {
        Some(_) => format!(" ({} packed, the rest windows and room for a chunk)", human_bytes(cache.packed_bytes)),
        None => String::new(),
    };
    format!(
        "{} bits ({how}): {}{packed} for {}, {:.2} of BF16's {}",
        human_bits(cache.bits),
        human_bytes(cache.bytes),
        counted(cache.tokens, "token"),
        cache.ratio,
        human_bytes(cache.bf16_bytes)
    )
}

impl Report for DemoReport {
    fn text(&self) -> String {
        let mut text = Lines::default();
        text.heading("1. The bundled model, converted");
        text.conversion(&self.convert);
        text.heading("2. Predicted gains, by layer");
        text.layers(&self.convert.layers);
        text.heading("3. The bundle, audited against the model");
        text.0.push_str(&wush_pipeline::audit::to_text(&self.inspect));
        text.heading("4. The calibration text's first page, continued over a 2-bit cache");
        let _ = write!(text.0, "…{}\n\n{}", self.generate.text, self.generate.text());
        match self.passed() {
            true => {
                text.next(&format!("{} --html report.html", audit_command(&self.convert)));
                text.next(&again_command(self));
            }
            false if self.convert.verdict == Verdict::Failed => text.failed(&self.convert.out),
            false => text.0.push_str("\nFAILED: the bundle did not pass its audit: see part 3\n"),
        }
        text.0
    }

    fn passed(&self) -> bool {
        DemoReport::passed(self)
    }
}

impl Report for DoctorReport {
    fn text(&self) -> String {
        let mut text = Lines::default();
        text.row("wush", &self.tool);
        text.row("auto", &self.auto);
        text.row("threads", &self.threads.to_string());
        text.heading("CUDA");
        for library in &self.libraries {
            let version = library.version.as_ref().map(|version| format!(" ({version})")).unwrap_or_default();
            let place = library.path.as_ref().or(library.problem.as_ref()).map_or("", String::as_str);
            let _ = writeln!(text.0, "{:<14} {}", library.name, printable(&format!("{place}{version}")));
        }
        text.row(
            "kernels",
            self.kernel_cache.as_deref().unwrap_or("compiled anew in every run: there is no cache folder"),
        );
        if !self.devices.is_empty() {
            text.heading("GPUs");
        }
        self.devices.iter().for_each(|device| text.device(device));
        if let Some(because) = &self.because {
            text.heading("Why no GPU is used");
            text.row("reason", because);
            self.hint.iter().for_each(|hint| text.row("hint", hint));
        }
        text.0
    }
}

/// What a model that streams through a card has beside it.
fn pinned(layers: Layers, n_bytes: u64) -> String {
    match layers {
        Layers::Resident => String::new(),
        Layers::Streamed => format!("; two layers at a time, hidden states in {} of host memory", human_bytes(n_bytes)),
    }
}

impl Report for BenchCalibrateReport {
    fn text(&self) -> String {
        let mut text = Lines::default();
        text.row("device", &self.device);
        text.ceilings(&self.ceilings);
        let sequences = counted(self.sequences, "sequence");
        text.row("calibration", &format!("{}, {sequences} of {} tokens", self.shape, self.seq_len));
        let [peak, planned] = [self.peak, self.planned].map(human_bytes);
        text.row("memory", &format!("{peak} at most, {planned} planned{}", pinned(self.layers, self.pinned)));
        let rate = self.operations_per_second / 1e12;
        let pace = format!(
            "{:.3} s a sequence, {:.0} tokens/s, {rate:.0} TFLOP/s",
            self.seconds_per_sequence, self.tokens_per_second
        );
        text.row("time", &pace);
        let over = format!(
            "{:.2} x the sustained product's time, {:.2} x the short one's",
            self.over_floor.sustained, self.over_floor.short
        );
        text.row("floor", &over);
        let _ = writeln!(text.0, "\n{:<24} {:>10}", "sequence", "s");
        for SequenceRow { sequence, seconds } in &self.rows {
            let _ = writeln!(text.0, "{sequence:<24} {seconds:>10.4}");
        }
        let _ = writeln!(text.0, "\n{:<24} {:>10}", "stage", "s");
        for StageRow { stage, seconds } in &self.stages {
            let _ = writeln!(text.0, "{stage:<24} {seconds:>10.4}");
        }
        text.0
    }
}

impl Report for BenchKernelsReport {
    fn text(&self) -> String {
        let mut text = Lines::default();
        text.row("device", &self.device);
        text.ceilings(&self.ceilings);
        text.row("layer", &format!("{}, {} tokens", self.shape, self.seq_len));
        let _ = writeln!(
            text.0,
            "\n{:<36} {:>10} {:>10} {:>8} {:>10} {:>7}",
            "kernel", "ms", "TFLOP/s", "TB/s", "floor, ms", "ratio"
        );
        for row in &self.rows {
            let KernelRow { kernel, seconds, operations_per_second, bytes_per_second, floor_seconds, ratio } = row;
            let _ = writeln!(
                text.0,
                "{kernel:<36} {:>10.3} {:>10.1} {:>8.2} {:>10.3} {ratio:>7.2}",
                seconds * 1e3,
                operations_per_second / 1e12,
                bytes_per_second / 1e12,
                floor_seconds * 1e3
            );
        }
        text.0
    }
}

/// The text being written. Writing into a String cannot fail, so its results are dropped.
#[derive(Default)]
struct Lines(String);

impl Lines {
    fn row(&mut self, name: &str, value: &str) {
        let _ = writeln!(self.0, "{name:<12} {}", printable(value));
    }

    /// Which layers have more than two bits, where bits were allotted.
    fn allotment(&mut self, of: &str, (bits, asked): (f64, Option<f64>), allotment: &[AllottedBits]) {
        for line in describe_allotment(allotment) {
            let _ = writeln!(self.0, "{of}, {}: {line}", describe_bits(bits, asked));
        }
    }

    fn ceilings(&mut self, ceilings: &CeilingsReport) {
        let CeilingsReport { matmul_short, matmul_sustained, copy } = *ceilings;
        let product =
            format!("{:.0} TFLOP/s in short runs, {:.0} sustained", matmul_short / 1e12, matmul_sustained / 1e12);
        self.row("product", &format!("{product} (bf16, 8192³)"));
        self.row("copy", &format!("{:.2} TB/s, read and written", copy / 1e12));
    }

    fn device(&mut self, device: &DeviceReport) {
        let DeviceReport { name, capability, multiprocessors, memory, .. } = device;
        let free = device.free_memory.map(|free| format!(", {} free", human_bytes(free))).unwrap_or_default();
        let memory = human_bytes(*memory);
        self.row(
            &device.device,
            &format!("{name}, compute capability {capability}, {multiprocessors} multiprocessors, {memory}{free}"),
        );
        self.row("", &format!("attention by {}", device.attention.join(", else ")));
        device.problem.iter().for_each(|problem| self.row("", problem));
    }

    fn heading(&mut self, heading: &str) {
        let gap = if self.0.is_empty() { "" } else { "\n" };
        let _ = writeln!(self.0, "{gap}{heading}\n{}", "-".repeat(heading.chars().count()));
    }

    fn next(&mut self, command: &str) {
        let _ = writeln!(self.0, "\nnext: {command}");
    }

    fn failed(&mut self, out: &WrittenDir) {
        let _ = writeln!(
            self.0,
            "\nFAILED: the bundle does not compute what its source does; kept for a look at {}. Once that is removed, `--resume` with \
             another --tolerance goes on from the sums",
            out.path
        );
    }

    fn file(&mut self, file: &WrittenFile) {
        self.row("out", &format!("{} ({})", file.path, human_bytes(file.n_bytes)));
    }

    fn dir(&mut self, dir: &WrittenDir) {
        self.row("out", &format!("{} ({}, {})", dir.path, counted(dir.n_files, "file"), human_bytes(dir.n_bytes)));
    }

    /// The manifest lists every file but itself, so it is counted apart.
    fn bundle(&mut self, dir: &WrittenDir) {
        let files = counted(dir.n_files.saturating_sub(1), "file");
        self.row("out", &format!("{} ({files} and the manifest, {})", dir.path, human_bytes(dir.n_bytes)));
    }

    fn notes(&mut self, notes: &[String]) {
        notes.iter().for_each(|note| self.row("note", note));
    }

    fn solve(&mut self, solve: &Solve) {
        self.row("transform", &describe_solve(solve));
    }

    fn calibration(&mut self, calibration: Option<&Calibration>) {
        let Some(calibration) = calibration else {
            self.row("calibration", "none: this transform needs no statistics");
            return;
        };
        let Calibration { source, sequences, tokens, max_seq_len, device, compute, .. } = calibration;
        self.row(
            "calibration",
            &format!(
                "{source}: {}, {}, up to position {max_seq_len}, on {device} in {compute}",
                counted(*sequences, "sequence"),
                counted(*tokens, "token")
            ),
        );
        if let Some(scaling) = &calibration.rope_scaling {
            self.row("RoPE scaling", scaling);
        }
    }

    fn conversion(&mut self, report: &ConvertReport) {
        let model = &report.model;
        self.row("model", &format!("{} ({}, {} layers), on {}", model.id, model.family, model.n_layers, report.device));
        self.calibration(report.calibration.as_ref());
        self.solve(&report.solve);
        let fold = &report.fold;
        let worst = format!("largest relative error {:.1e} in layer {}", fold.max_rel_error, fold.worst_layer);
        let stored = if fold.dtype == "keep" { " (as stored)" } else { "" };
        self.row("fold", &format!("{}{stored}, {worst}", report.folded_dtype));
        self.equivalence(report);
        self.row("verdict", verdict(report));
        self.row("time", &human_time(Duration::from_secs_f64(report.seconds)));
        self.bundle(&report.out);
        self.notes(&report.notes);
    }

    fn equivalence(&mut self, report: &ConvertReport) {
        let Some(found) = &report.equivalence else {
            self.row("equivalence", "not checked: no sequences were given to run");
            return;
        };
        let (before, after) = (found.nll_source, found.nll_bundle);
        let (change, tolerance) = (percent((after - before) / before, 4), percent(found.tolerance, 2));
        let verdict = if found.passed { "ok" } else { "FAILED" };
        let sign = if after >= before { "+" } else { "" };
        let text = report.verify_text.as_ref().map(|text| format!(" of {text}")).unwrap_or_default();
        self.row(
            "equivalence",
            &format!(
                "{verdict}: mean NLL {before:.5} before, {after:.5} after ({sign}{change}, tolerance {tolerance}), {}{text}",
                counted(found.tokens, "token")
            ),
        );
        let (kl, logit, nll) = (found.mean_kl, found.max_logit_diff, found.max_nll_diff);
        self.row(
            "",
            &format!("mean KL {kl:.1e}, largest difference of a logit {logit:.1e}, of a token's NLL {nll:.1e}"),
        );
    }

    /// Predicted gain and conditioning by layer; heads are summed up by their geometric mean and their worst.
    fn layers(&mut self, layers: &[LayerReport]) {
        if layers.is_empty() {
            return;
        }
        let _ = writeln!(self.0, "\n         predicted gain        worst cond(T)        lowest rank");
        let _ = writeln!(self.0, "layer       key    value       key     value       key   value");
        for layer in layers {
            let [key, value] = [&layer.key, &layer.value].map(|heads| HeadSummary::of(heads));
            let _ = writeln!(
                self.0,
                "{:>5} {:>8.2}x {:>7.2}x {:>9} {:>9} {:>9} {:>7}",
                layer.layer,
                key.gain,
                value.gain,
                ratio(key.cond),
                ratio(value.cond),
                key.rank,
                value.rank
            );
        }
        let Some(Gain { key, value }) = Gain::of(layers) else { return };
        let _ = writeln!(
            self.0,
            "{:>5} {key:>8.2}x {value:>7.2}x  (geometric mean)\nThe gain is {}.\nThe lowest rank is that of the statistics of \
             any head: below the head dimension, some directions were never seen.",
            "all",
            describe_gain()
        );
    }
}

/// "6, of 2 KV heads of 64 each", or the first and the last where they differ.
fn heads_of(layers: &[ExportedLayer]) -> String {
    let heads =
        |layer: &ExportedLayer| format!("{} of {}", counted(layer.n_kv_heads as u64, "KV head"), layer.head_dim);
    let kinds: Vec<String> = layers.iter().map(heads).collect();
    let first = kinds.first().map_or("", String::as_str);
    let more = if kinds.iter().all(|kind| kind == first) { "" } else { ", others differ" };
    format!("{}, {first}{more}", layers.len())
}

/// What the verdict covers.
fn verdict(report: &ConvertReport) -> &'static str {
    match (report.verdict, &report.equivalence) {
        (Verdict::Failed, _) => "FAILED",
        (Verdict::Ok, Some(_)) => "ok",
        (Verdict::Ok, None) => "ok, equivalence not checked",
    }
}

/// A ratio in percent with `digits` decimals, and with an exponent where those would show nothing of it.
fn percent(ratio: f64, digits: usize) -> String {
    let percent = ratio * 100.0;
    let is_shown = percent == 0.0 || percent.abs() >= 10f64.powi(-(digits as i32));
    if is_shown { format!("{percent:.digits$} %") } else { format!("{percent:.1e} %") }
}

/// The tour's conversion, as a command of its own.
fn again_command(report: &DemoReport) -> String {
    let again = &report.again;
    format!(
        "wush convert {} --calib {} --sequences {} --seq-len {} --out my-bundle",
        shell_word(&report.convert.model.argument),
        shell_word(&again.text),
        again.sequences,
        again.seq_len
    )
}

/// The audit of a bundle against the model that it was made from.
fn audit_command(report: &ConvertReport) -> String {
    format!("wush inspect {} --base {}", shell_word(&report.out.path), shell_word(&report.model.argument))
}

/// The heads of one layer and role.
struct HeadSummary {
    gain: f64,
    cond: f64,
    rank: usize,
}

impl HeadSummary {
    fn of(heads: &[HeadReport]) -> Self {
        Self {
            gain: gain(heads.iter()),
            cond: heads.iter().map(|head| head.cond_transform).fold(0.0, f64::max),
            rank: heads.iter().map(|head| head.rank_gram.min(head.rank_hessian)).min().unwrap_or(0),
        }
    }
}

fn gain<'a>(heads: impl Iterator<Item = &'a HeadReport>) -> f64 {
    geometric_mean(heads.map(|head| head.gain())).unwrap_or(1.0)
}

fn rated(seconds: f64, n_tokens: u64) -> String {
    format!("{}, {:.0} tokens/s", human_time(Duration::from_secs_f64(seconds)), n_tokens as f64 / seconds.max(1e-9))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn small_percentages_are_not_shown_as_nothing() {
        assert_eq!([0.002, 1e-12, 0.0].map(|ratio| percent(ratio, 2)), ["0.20 %", "1.0e-10 %", "0.00 %"]);
        assert_eq!([-2e-6, -1e-9].map(|ratio| percent(ratio, 4)), ["-0.0002 %", "-1.0e-7 %"]);
    }
}
