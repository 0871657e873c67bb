//! The wush program: arguments become a request, the pipeline does the work, a report goes to stdout. Knows no numbers,
//! dtypes or tensor names; progress and errors go to stderr.

mod cli;
mod demo_model;
mod interrupt;
mod progress;
mod render;
mod stream;

use std::io::{ErrorKind, Write};
use std::ops::ControlFlow;
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Parser;
use wush_pipeline::request::{DemoRequest, Environment, HubOptions};
use wush_pipeline::{AsPage, PipelineError, printable};

use crate::cli::{BenchCommand, Cli, Command, EvalCommand, Format, GenerateArgs, GlobalArgs};
use crate::progress::{Progress, Verbosity};
use crate::render::Report;
use crate::stream::Stream;

/// Activations come and go by the megabyte, a layer at a time: the system's allocator would return each to the kernel and fault
/// it in anew, some 5 % of a calibration.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Exit code of a run that finished with a failed check.
const EXIT_CHECK_FAILED: u8 = 1;
/// Exit code of an error.
const EXIT_ERROR: u8 = 2;

fn main() -> ExitCode {
    let cli = Cli::parse();
    match run(cli) {
        Ok(code) => code,
        Err(error) => explain(&error),
    }
}

/// Runs one command: its report on stdout, its verdict as exit code.
fn run(cli: Cli) -> Result<ExitCode> {
    interrupt::install().context("cannot handle signals")?;
    wush_pipeline::use_threads(cli.global.threads)?;
    let progress = Progress::new(verbosity(&cli.global));
    let env = Environment { monitor: &progress, hub: HubOptions::default() };
    let format = cli.global.format;
    match cli.command {
        Command::Convert(args) => emit(&wush_pipeline::convert(&args.request(), &env)?, format),
        Command::Calibrate(args) => emit(&wush_pipeline::calibrate(&args.request(), &env)?, format),
        Command::Merge(args) => emit(&wush_pipeline::merge(&args.request(), &env)?, format),
        Command::Solve(args) => emit(&wush_pipeline::solve(&args.request(), &env)?, format),
        Command::Fold(args) => emit(&wush_pipeline::fold(&args.request(), &env)?, format),
        Command::Unfold(args) => emit(&wush_pipeline::unfold(&args.request(), &env)?, format),
        Command::Export(args) => emit(&wush_pipeline::export(&args.request(), &env)?, format),
        Command::Inspect(args) => {
            let request = args.request();
            let report = wush_pipeline::inspect(&request, &env)?;
            emit_with_page(&report, format, request.html.as_deref(), &env)
        }
        Command::Eval(args) => evaluate(args.command, &env, format),
        Command::Generate(args) => generate(args, &env, &cli.global),
        Command::Serve(args) => emit(&wush_pipeline::serve(&args.request(), &env)?, format),
        Command::Demo(args) => {
            let request = DemoRequest { out: args.out, files: demo_model::FILES };
            emit(&wush_pipeline::demo(&request, &env)?, format)
        }
        Command::Bench(args) => match args.command {
            BenchCommand::Calibrate(args) => emit(&wush_pipeline::bench_calibrate(&args.request(), &env)?, format),
            BenchCommand::Kernels(args) => emit(&wush_pipeline::bench_kernels(&args.request(), &env)?, format),
        },
        Command::Doctor => emit(&wush_pipeline::doctor(), format),
        Command::Schema(args) => {
            print(&schema_text(args.name.as_deref())?)?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

fn verbosity(args: &GlobalArgs) -> Verbosity {
    match args {
        GlobalArgs { quiet: true, .. } => Verbosity::Quiet,
        GlobalArgs { verbose: true, .. } => Verbosity::Verbose,
        _ => Verbosity::Normal,
    }
}

/// Prints a report and turns its verdict into an exit code.
fn emit<R: Report>(report: &R, format: Format) -> Result<ExitCode> {
    let text = match format {
        // Whatever a file's or a directory's name holds, it draws nothing.
        Format::Text => report.text().lines().map(|line| format!("{}\n", printable(line))).collect(),
        Format::Json => serde_json::to_string_pretty(report).context("report")? + "\n",
    };
    print(&text)?;
    Ok(if report.passed() { ExitCode::SUCCESS } else { ExitCode::from(EXIT_CHECK_FAILED) })
}

/// The same, and then the page: a report that is out is not lost where its page cannot be written.
fn emit_with_page<R>(report: &R, format: Format, page: Option<&Path>, env: &Environment<'_>) -> Result<ExitCode>
where
    R: Report + AsPage,
{
    let code = emit(report, format)?;
    page.map(|path| wush_pipeline::write_page(report, path, env.monitor)).transpose()?;
    Ok(code)
}

fn evaluate(command: EvalCommand, env: &Environment<'_>, format: Format) -> Result<ExitCode> {
    match command {
        EvalCommand::Ppl(args) => {
            let request = args.request();
            let report = wush_pipeline::eval_ppl(&request, env)?;
            emit_with_page(&report, format, request.eval.html.as_deref(), env)
        }
        EvalCommand::Recon(args) => {
            let request = args.request();
            let report = wush_pipeline::eval_recon(&request, env)?;
            emit_with_page(&report, format, request.html.as_deref(), env)
        }
    }
}

/// Text goes to stdout while it comes, and what it took to stderr; as JSON all of it is one report on stdout.
fn generate(args: GenerateArgs, env: &Environment<'_>, global: &GlobalArgs) -> Result<ExitCode> {
    if global.format == Format::Json {
        let report = wush_pipeline::generate(&args.request(), env, &mut |_| ControlFlow::Continue(()))?;
        return emit(&report, global.format);
    }
    let mut stream = Stream::stdout();
    let report = wush_pipeline::generate(&args.request(), env, &mut |piece| stream.tell(piece));
    stream.end()?;
    let report = report?;
    if !global.quiet {
        // A closed stderr is no reason to fail.
        let _ = write!(std::io::stderr(), "\n{}", report.text());
    }
    Ok(ExitCode::SUCCESS)
}

/// One schema, or the names of all.
fn schema_text(name: Option<&str>) -> Result<String> {
    match name.and_then(wush_pipeline::schema::find) {
        Some(schema) => Ok(schema.text()),
        None => Ok(wush_pipeline::schema::names().join("\n") + "\n"),
    }
}

/// To stdout. A reader that closed the pipe has seen enough: that is no error.
fn print(text: &str) -> Result<()> {
    let mut stdout = std::io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(PipelineError::stdout(error).into()),
        _ => Ok(()),
    }
}

/// One message, one hint, and the exit code.
fn explain(error: &anyhow::Error) -> ExitCode {
    let pipeline = error.downcast_ref::<PipelineError>();
    let interrupted = pipeline.is_some_and(PipelineError::is_interruption);
    let message = match pipeline {
        Some(stop) if interrupted => stop.to_string(),
        // Its message tells the causes already.
        Some(failure) => format!("error: {failure}"),
        None => format!("error: {error:#}"),
    };
    let hint = pipeline.and_then(PipelineError::hint).map(|hint| format!("hint: {hint}"));
    for line in [Some(message), hint].into_iter().flatten() {
        // A closed stderr leaves the exit code to speak.
        let _ = writeln!(std::io::stderr(), "{}", printable(&line));
    }
    ExitCode::from(if interrupted { interrupt::EXIT_INTERRUPTED } else { EXIT_ERROR })
}
