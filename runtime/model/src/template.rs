//! Chat templates: the model's own Jinja source turns messages into its prompt text.
//!
//! The environment is that of the reference library: blocks trim white space, the methods of
//! Python's strings and dictionaries work, and so do `raise_exception`, `strftime_now`,
//! `tojson` and loop controls. A template comes out of a file that nobody vouches for, so
//! that work and memory are bounded.

mod json;
mod time;

use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, Error, ErrorKind, Value};
use minijinja_contrib::pycompat::unknown_method_callback;

/// Work allowed to a template besides that for the messages: an instruction, or 64 bytes.
/// Published templates need some hundred; this is a fraction of a second and at most 64 MB.
const FUEL: u64 = 1_000_000;
/// Work allowed for each message besides.
const FUEL_PER_MESSAGE: u64 = 5_000;
/// Depth of nested blocks and macro calls.
const DEPTH: usize = 100;
/// Longest template in bytes; published ones have up to some 20 kB.
const MAX_SOURCE: usize = 1 << 20;

/// Why a chat template cannot be used, or refuses a conversation.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum TemplateError {
    /// The source is not a template.
    #[error(
        "the model's chat template cannot be read, line {line}: {what}; give another template, \
         or run the model without one"
    )]
    Syntax {
        /// Line of the template.
        line: usize,
        /// What is wrong there.
        what: String,
    },
    /// The template calls `raise_exception`.
    #[error("the model's chat template refuses these messages: {0}")]
    Refused(String),
    /// Something fails while rendering.
    #[error("the model's chat template fails at line {line}: {what}")]
    Render {
        /// Line of the template.
        line: usize,
        /// What fails there.
        what: String,
    },
    /// The template works on without end.
    #[error(
        "the model's chat template was stopped at line {line}: it takes more work or memory than \
         any honest template; do not use this file, or run the model without a template"
    )]
    Endless {
        /// Line of the template.
        line: usize,
    },
}

/// One turn of a conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// `system`, `user`, `assistant` or what else the template knows.
    pub role: String,
    /// The text.
    pub content: String,
}

impl Message {
    /// A turn.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Message { role: role.into(), content: content.into() }
    }
}

/// A compiled chat template.
#[derive(Clone, Debug)]
pub struct ChatTemplate {
    environment: Environment<'static>,
    bos: String,
    eos: String,
}

/// The name under which the template is kept; its end decides that nothing is escaped.
const NAME: &str = "chat";

impl ChatTemplate {
    /// Compiles `source`. `bos` and `eos` are the texts of these tokens, empty for none.
    ///
    /// # Errors
    /// [`TemplateError::Syntax`].
    pub fn new(source: &str, bos: &str, eos: &str) -> Result<Self, TemplateError> {
        if source.len() > MAX_SOURCE {
            let what = format!("it is {} bytes long, more than {MAX_SOURCE}", source.len());
            return Err(TemplateError::Syntax { line: 1, what });
        }
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        environment.set_syntax(syntax.map_err(syntax_error)?);
        environment.set_recursion_limit(DEPTH);
        environment.set_unknown_method_callback(unknown_method_callback);
        environment.add_function("raise_exception", raise_exception);
        environment.add_function("strftime_now", time::strftime_now);
        environment.add_filter("tojson", json::tojson);
        environment
            .add_template_owned(NAME, without_generation_blocks(source))
            .map_err(syntax_error)?;
        Ok(ChatTemplate { environment, bos: bos.to_owned(), eos: eos.to_owned() })
    }

    /// The prompt text of a conversation; where `add_generation_prompt`, with the beginning of
    /// the answer.
    ///
    /// # Errors
    /// The template's own refusals, failures in it, and endless work.
    pub fn render(
        &self,
        messages: &[Message],
        add_generation_prompt: bool,
    ) -> Result<String, TemplateError> {
        let bytes: usize = messages.iter().map(|m| m.role.len() + m.content.len()).sum();
        let fuel = FUEL + FUEL_PER_MESSAGE * messages.len() as u64 + bytes as u64;
        let turns = messages.iter().map(|message| {
            Value::from_iter([("role", message.role.as_str()), ("content", message.content.as_str())])
        });
        let context = Value::from_iter([
            ("messages", turns.collect::<Value>()),
            ("add_generation_prompt", add_generation_prompt.into()),
            ("bos_token", self.bos.as_str().into()),
            ("eos_token", self.eos.as_str().into()),
            // The reference library passes these as none where the caller gives none.
            ("tools", ().into()),
            ("documents", ().into()),
        ]);
        let mut environment = self.environment.clone();
        environment.set_fuel(Some(fuel));
        let template = environment.get_template(NAME).map_err(syntax_error)?;
        template.render(context).map_err(render_error)
    }
}

/// What a template says with `raise_exception`; carried as the cause of the engine's error.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Refusal(String);

fn raise_exception(message: String) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, "raise_exception").with_source(Refusal(message)))
}

fn syntax_error(error: Error) -> TemplateError {
    TemplateError::Syntax { line: error.line().unwrap_or(1), what: describe(&error) }
}

fn render_error(error: Error) -> TemplateError {
    let line = error.line().unwrap_or(1);
    let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(&error);
    let mut kinds = Vec::new();
    while let Some(current) = cause {
        if let Some(Refusal(message)) = current.downcast_ref() {
            return TemplateError::Refused(message.clone());
        }
        kinds.extend(current.downcast_ref::<Error>().map(Error::kind));
        cause = current.source();
    }
    match kinds.contains(&ErrorKind::OutOfFuel) {
        true => TemplateError::Endless { line },
        false => TemplateError::Render { line, what: describe(&error) },
    }
}

/// The engine's words without place, which our messages give.
fn describe(error: &Error) -> String {
    match error.detail() {
        Some(detail) => format!("{}: {detail}", error.kind()),
        None => error.kind().to_string(),
    }
}

/// Training templates mark the model's own text with `{% generation %}` blocks, which mean
/// nothing here: the tags become a block that is always taken, white-space marks as they were.
fn without_generation_blocks(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some((before, tag, after)) = next_tag(rest) {
        out.push_str(before);
        let name = tag.trim_matches(|c: char| c == '-' || c == '+' || c.is_whitespace());
        let replaced = match name {
            "generation" => tag.replace(name, "if true"),
            "endgeneration" => tag.replace(name, "endif"),
            _ => tag.to_owned(),
        };
        out.push_str(&format!("{{%{replaced}%}}"));
        rest = after;
    }
    out + rest
}

/// Text before a tag, the tag's inside, and what follows it.
fn next_tag(text: &str) -> Option<(&str, &str, &str)> {
    let (before, after) = text.split_once("{%")?;
    let (tag, rest) = after.split_once("%}")?;
    Some((before, tag, rest))
}
