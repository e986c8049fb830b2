//! Chat templates: the model's own Jinja source turns messages into its prompt text.
//!
//! The environment is that of the reference library: blocks trim white space, the methods of
//! Python's strings and dictionaries work, and so do `raise_exception`, `strftime_now`,
//! `tojson` and loop controls.
//!
//! A template comes out of a file that nobody vouches for. Loops, recursion and text that grow
//! without end are stopped by a budget of work and memory, and deep nesting by limits of depth
//! and a stack of its own. What the engine does not meter remains, and hangs: a list made of
//! itself many times over (`x = [x, x]` or `x = x + x`, sixty times) and then compared,
//! concatenated or turned into text by a filter.

mod json;
mod time;

use minijinja::syntax::SyntaxConfig;
use minijinja::{Environment, Error, ErrorKind, State, Value, context};
use minijinja_contrib::pycompat::unknown_method_callback;

/// Work allowed to a template besides that for the messages: an instruction, or 64 bytes.
/// Published templates need some hundred; this is a fraction of a second and at most 16 MB.
const FUEL: u64 = 250_000;
/// Work allowed for each message besides; published templates need some fifty.
const FUEL_PER_MESSAGE: u64 = 2_000;
/// Depth of nested blocks and macro calls.
const DEPTH: usize = 100;
/// Longest template in bytes; published ones have up to some 20 kB.
const MAX_SOURCE: usize = 128 << 10;
/// Stack for the engine in bytes, of which only what it touches is taken. Its compiler takes
/// a frame for each sign of `- - - 1`, and freeing a nested value one for each level.
const STACK: usize = 256 << 20;

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
        Message {
            role: role.into(),
            content: content.into(),
        }
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
        let environment = on_own_stack(|| Self::compile(source))?;
        Ok(ChatTemplate {
            environment,
            bos: bos.to_owned(),
            eos: eos.to_owned(),
        })
    }

    fn compile(source: &str) -> Result<Environment<'static>, TemplateError> {
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder()
            .trim_blocks(true)
            .lstrip_blocks(true)
            .build();
        environment.set_syntax(syntax.map_err(syntax_error)?);
        environment.set_recursion_limit(DEPTH);
        environment.set_unknown_method_callback(python_method);
        environment.set_formatter(json::print);
        environment.remove_filter("format");
        environment.add_function("raise_exception", raise_exception);
        environment.add_function("strftime_now", time::strftime_now);
        environment.add_filter("tojson", json::tojson);
        environment
            .add_template_owned(NAME, without_generation_blocks(source))
            .map_err(syntax_error)?;
        Ok(environment)
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
        on_own_stack(|| self.render_here(messages, add_generation_prompt))
    }

    fn render_here(
        &self,
        messages: &[Message],
        add_generation_prompt: bool,
    ) -> Result<String, TemplateError> {
        let bytes: usize = messages
            .iter()
            .map(|m| m.role.len() + m.content.len())
            .sum();
        // A sixteenth of a unit for each byte lets a template copy the messages four times.
        let fuel = FUEL + FUEL_PER_MESSAGE * messages.len() as u64 + bytes as u64 / 16;
        let turn =
            |m: &Message| context! { role => m.role.as_str(), content => m.content.as_str() };
        let context = context! {
            messages => messages.iter().map(turn).collect::<Vec<Value>>(),
            add_generation_prompt,
            bos_token => self.bos.as_str(),
            eos_token => self.eos.as_str(),
            // The reference library passes these as none where the caller gives none.
            tools => (),
            documents => (),
        };
        let mut environment = self.environment.clone();
        environment.set_fuel(Some(fuel));
        let template = environment.get_template(NAME).map_err(syntax_error)?;
        template.render(context).map_err(render_error)
    }
}

/// Runs the engine on a stack that its recursion cannot exhaust.
fn on_own_stack<T: Send>(
    work: impl FnOnce() -> Result<T, TemplateError> + Send,
) -> Result<T, TemplateError> {
    let fail = |what: &str| {
        Err(TemplateError::Render {
            line: 1,
            what: what.to_owned(),
        })
    };
    std::thread::scope(|scope| {
        match std::thread::Builder::new()
            .stack_size(STACK)
            .spawn_scoped(scope, work)
        {
            Ok(thread) => thread
                .join()
                .unwrap_or_else(|_| fail("the template engine failed")),
            Err(error) => fail(&format!("there is no thread for it: {error}")),
        }
    })
}

/// Methods of Python's types. Of `format`, widths that fill the memory are refused: they are
/// not metered.
fn python_method(
    state: &mut State,
    value: &Value,
    method: &str,
    args: &[Value],
) -> Result<Value, Error> {
    let text = value.as_str().unwrap_or_default();
    let digits = text
        .split(|c: char| !c.is_ascii_digit())
        .map(str::len)
        .max();
    let nested = text.split('{').any(|field| !field.contains('}'));
    if method == "format" && (digits > Some(3) || nested && text.matches('{').count() > 1) {
        return Err(Error::new(
            ErrorKind::InvalidOperation,
            "format: a width is too large or computed",
        ));
    }
    unknown_method_callback(state, value, method, args)
}

/// What a template says with `raise_exception`; carried as the cause of the engine's error.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct Refusal(String);

fn raise_exception(message: String) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, "raise_exception").with_source(Refusal(message)))
}

fn syntax_error(error: Error) -> TemplateError {
    TemplateError::Syntax {
        line: error.line().unwrap_or(1),
        what: describe(&error),
    }
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
        false => TemplateError::Render {
            line,
            what: describe(&error),
        },
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
