//! The tour: the bundled model is converted, audited against itself, and writes on over a 2-bit cache, without a network.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use wush_data::CalibSource;
use wush_fold::FoldDtype;
use wush_format::FormatError;
use wush_format::atomic::{StagedDir, write_file};

use crate::paths::require_absent;
use crate::plan::{DEFAULT_TEXT_FIELD, DEFAULT_TRANSFORM, DEFAULT_VERIFY_SEQUENCES};
use crate::report::{Again, DemoReport};
use crate::request::{
    CacheRequest, CalibrationRequest, Chat, ConvertRequest, DemoRequest, DeviceChoice, Environment, GenerateRequest,
    InspectRequest, KvBits, ModelRequest, Preset, PromptSource, Sampling, SolveSettings, VerifySettings, Windows,
};
use crate::{DEFAULT_CHUNK, PipelineError, Result, convert, generate, inspect};

/// The model inside the demo's directory.
const MODEL: &str = "demo-model";
/// The bundle inside the demo's directory.
const BUNDLE: &str = "demo-model-wush";
/// The calibration text among the model's files.
const TEXT: &str = "calibration.txt";
/// Calibration of the tour: as in the study of the model's README, and done within a minute on two cores.
const SEQUENCES: usize = 64;
/// Tokens a sequence.
const SEQ_LEN: usize = 1024;
/// Bytes of the text that are the prompt: tokens enough to leave the windows.
const PROMPT_BYTES: usize = 2000;
/// Tokens that the model writes on.
const NEW_TOKENS: usize = 60;
/// Of its draws: so small a model repeats itself when it always takes the most likely token.
const TEMPERATURE: f64 = 0.7;
/// See [`TEMPERATURE`].
const TOP_P: f64 = 0.9;

/// `wush demo`: unpacks the model, converts it, inspects the bundle and lets it write. The directory appears once all of it is there.
///
/// # Errors
/// `OutputExists` when the directory is there already; `Io`; `Interrupted`.
pub fn demo(request: &DemoRequest, env: &Environment<'_>) -> Result<DemoReport> {
    require_absent(&request.out)?;
    let staged = StagedDir::create(&request.out)?;
    let model = staged.path().join(MODEL);
    unpack(request.files, &model)?;
    let bundle = staged.path().join(BUNDLE);
    let mut convert = convert(&convert_request(&model, bundle.clone())?, env).map_err(from_the_start)?;
    let audit =
        InspectRequest { path: PathBuf::from(&convert.out.path), base: Some(model.display().to_string()), html: None };
    let mut inspect = inspect(&audit, env)?;
    let mut generate = generate(&generate_request(&model, &bundle)?, env, &mut |_| ControlFlow::Continue(()))?;
    let shown = |staged_path: &str| match Path::new(staged_path).strip_prefix(staged.path()) {
        Ok(inner) => request.out.join(inner).display().to_string(),
        Err(_) => staged_path.to_owned(),
    };
    convert.out.path = shown(&convert.out.path);
    convert.model.argument = shown(&convert.model.argument);
    generate.model.argument = shown(&generate.model.argument);
    inspect.path = shown(&inspect.path);
    inspect.base = inspect.base.as_deref().map(shown);
    staged.commit()?;
    let text = request.out.join(MODEL).join(TEXT).display().to_string();
    Ok(DemoReport { convert, inspect, generate, again: Again { text, sequences: SEQUENCES, seq_len: SEQ_LEN } })
}

/// A tour that was stopped leaves nothing to continue.
fn from_the_start(error: PipelineError) -> PipelineError {
    if error.is_interruption() { PipelineError::Interrupted { kept: None } } else { error }
}

fn unpack(files: &[(&str, &[u8])], dir: &Path) -> Result<()> {
    std::fs::create_dir(dir).map_err(|e| FormatError::io(dir, "create", e))?;
    Ok(files.iter().try_for_each(|(name, bytes)| write_file(&dir.join(name), bytes))?)
}

fn convert_request(model: &Path, out: PathBuf) -> Result<ConvertRequest> {
    Ok(ConvertRequest {
        max_gpu_memory: None,
        model: ModelRequest { model: model.display().to_string(), device: DeviceChoice::Auto, rope_scaling: None },
        calibration: CalibrationRequest {
            source: model.join(TEXT).display().to_string().parse::<CalibSource>()?,
            text_field: DEFAULT_TEXT_FIELD.to_owned(),
            sequences: Some(SEQUENCES),
            seq_len: Some(SEQ_LEN),
        },
        settings: SolveSettings::of_preset(DEFAULT_TRANSFORM, Preset::Default),
        dtype: FoldDtype::Keep,
        verify: VerifySettings { sequences: DEFAULT_VERIFY_SEQUENCES, tolerance: None },
        resume: false,
        out,
    })
}

/// The text's first page, continued over the bundle's own cache.
fn generate_request(model: &Path, bundle: &Path) -> Result<GenerateRequest> {
    let path = model.join(TEXT);
    let text = std::fs::read_to_string(&path).map_err(|e| FormatError::io(&path, "read", e))?;
    Ok(GenerateRequest {
        model: ModelRequest { model: bundle.display().to_string(), device: DeviceChoice::Auto, rope_scaling: None },
        prompt: PromptSource::Text(text[..text.floor_char_boundary(PROMPT_BYTES)].to_owned()),
        system: None,
        chat: Chat::Auto,
        cache: CacheRequest {
            kv_bits: Some(KvBits::OF_BUNDLE),
            quantizer: None,
            windows: Windows::STUDY.into(),
            chunk: DEFAULT_CHUNK,
        },
        max_new_tokens: NEW_TOKENS,
        sampling: Sampling { temperature: TEMPERATURE, top_p: TOP_P, ..Sampling::GREEDY },
    })
}
