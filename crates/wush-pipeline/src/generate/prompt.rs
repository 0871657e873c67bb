//! The prompt: where it comes from, and the token ids that it becomes.

use std::fs::File;
use std::io::Read;
use std::path::Path;
use std::time::SystemTime;

use wush_checkpoint::chat::{ChatTemplate, Message};
use wush_checkpoint::tokenizer::TextTokenizer;
use wush_format::FormatError;

use crate::model::Model;
use crate::request::{Chat, GenerateRequest, PromptSource};
use crate::{PipelineError, Result};

/// Longest prompt, in bytes: some millions of tokens, more than any model reads.
const MAX_BYTES: u64 = 16 << 20;
/// What messages call the standard input.
const STDIN: &str = "stdin";

/// A prompt as the model gets it.
pub(super) struct Prompt {
    /// With what the tokenizer or the template puts before and after it.
    pub(super) ids: Vec<u32>,
    /// Whether the chat template was applied.
    pub(super) chat: bool,
}

impl Prompt {
    /// Reads the prompt, applies the chat template where there is one (or as `--chat` says), and encodes it. Without a template
    /// the token that the tokenizer puts before a text comes first.
    ///
    /// # Errors
    /// `EmptyPrompt`; `NoChatTemplate`, also for a system message; `Format`, `Checkpoint`; `Option` for a prompt that is too
    /// long to be read, and for a system message with `--chat never`.
    pub(super) fn new(model: &Model, tokenizer: &TextTokenizer, request: &GenerateRequest) -> Result<Self> {
        let (chat, system) = (request.chat, request.system.as_ref());
        if let (Chat::Never, Some(_)) = (chat, system) {
            let (expected, found) = ("none with --chat never".to_owned(), "one".to_owned());
            return Err(PipelineError::Option { option: "--system", expected, found });
        }
        let text = read(&request.prompt)?;
        let template = match chat {
            Chat::Never => None,
            Chat::Auto | Chat::Always => ChatTemplate::open(model.dir())?,
        };
        if template.is_none() && (chat == Chat::Always || system.is_some()) {
            return Err(PipelineError::NoChatTemplate { dir: model.dir().to_owned() });
        }
        let chat = template.is_some();
        let ids = match template {
            Some(template) if !text.is_empty() => {
                let system = system.map(|text| Message { role: "system", content: text.clone() });
                let messages: Vec<Message> =
                    system.into_iter().chain([Message { role: "user", content: text }]).collect();
                tokenizer.encode(&template.render(&messages, SystemTime::now())?)?
            }
            _ => tokenizer.encode(&text)?,
        };
        if ids.is_empty() {
            return Err(PipelineError::EmptyPrompt);
        }
        let bos = tokenizer.bos().filter(|_| !chat);
        Ok(Self { ids: bos.into_iter().chain(ids).collect(), chat })
    }
}

/// The text; of a file or the standard input without its last line end.
fn read(source: &PromptSource) -> Result<String> {
    let (name, text) = match source {
        PromptSource::Text(text) => return Ok(text.clone()),
        PromptSource::File(path) => {
            let file = File::open(path).map_err(|e| FormatError::io(path, "open", e))?;
            (path.as_path(), read_bounded(path, file)?)
        }
        PromptSource::Stdin => (Path::new(STDIN), read_bounded(Path::new(STDIN), std::io::stdin().lock())?),
    };
    let text = String::from_utf8(text).map_err(|e| PipelineError::Option {
        option: "--prompt-file",
        expected: "text in UTF-8".to_owned(),
        found: format!("another byte at {} of {}", e.utf8_error().valid_up_to(), name.display()),
    })?;
    let end = text.strip_suffix('\n').map(|text| text.strip_suffix('\r').unwrap_or(text).len());
    Ok(text[..end.unwrap_or(text.len())].to_owned())
}

fn read_bounded(name: &Path, file: impl Read) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    file.take(MAX_BYTES + 1).read_to_end(&mut bytes).map_err(|e| FormatError::io(name, "read", e))?;
    if bytes.len() as u64 > MAX_BYTES {
        let (expected, found) = (format!("at most {MAX_BYTES} bytes"), format!("more in {}", name.display()));
        return Err(PipelineError::Option { option: "--prompt-file", expected, found });
    }
    Ok(bytes)
}
