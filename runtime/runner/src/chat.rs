//! `runner chat`: a conversation in the terminal.

use std::io::{ErrorKind, IsTerminal, Write};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use myq_engine::{Engine, Stats, Stop, generate};
use myq_model::Sampler;
use myq_model::template::{ChatTemplate, Message};
use myq_model::tokenizer::TextStream;
use rustyline::error::ReadlineError;

use crate::args::Chat;
use crate::load::{self, Outcome};
use crate::run::summary;

const HELP: &str = "\
  /reset          forget the conversation
  /system TEXT    set the system message and start again
  /retry          answer the last message again
  /stats          figures of the last answer
  /quit           leave (also Ctrl-D)
  A line that ends in \\ goes on in the next. Ctrl-C stops an answer.";

/// A conversation and what of it is in the engine's cache.
struct Conversation {
    engine: Engine,
    template: ChatTemplate,
    sampler: Sampler,
    system: Option<String>,
    messages: Vec<Message>,
    cached: Vec<u32>,
    last: Option<Stats>,
}

pub(crate) fn chat(options: &Chat) -> Outcome {
    let settings = options.sampling.settings()?;
    let engine = load::open(&options.model)?;
    let Some(template) = engine.source().template()? else {
        return Err(
            "this model has no chat template; use `runner run --raw` to continue a text".into(),
        );
    };
    let interrupted = Arc::new(AtomicBool::new(false));
    let name = engine.source().config.name.clone();
    let sampler = Sampler::new(settings, engine.source().config.vocab);
    let mut talk = Conversation {
        engine,
        template,
        sampler,
        system: options.system.clone(),
        messages: Vec::new(),
        cached: Vec::new(),
        last: None,
    };
    println!("{name} — /help for commands, Ctrl-D to leave");
    let mut editor = rustyline::DefaultEditor::new()?;
    // After the editor, which installs a handler of its own: both are then called.
    if std::io::stdin().is_terminal() {
        signal_hook::flag::register(signal_hook::consts::SIGINT, interrupted.clone())?;
    }
    loop {
        let line = match read(&mut editor) {
            Ok(line) => line,
            Err(ReadlineError::Interrupted | ReadlineError::Signal(_)) => continue,
            Err(ReadlineError::Eof) => return Ok(()),
            // A line that is not UTF-8.
            Err(ReadlineError::Io(error)) if error.kind() == ErrorKind::InvalidData => {
                eprintln!("error: {error}");
                continue;
            }
            Err(error) => return Err(error.into()),
        };
        let text = line.trim();
        let (word, rest) = text.split_once(char::is_whitespace).unwrap_or((text, ""));
        match word {
            "" => continue,
            "/quit" | "/exit" => return Ok(()),
            "/help" => println!("{HELP}"),
            "/reset" => talk.messages.clear(),
            "/system" => {
                talk.system = (!rest.is_empty()).then(|| rest.to_owned());
                talk.messages.clear();
            }
            "/stats" => match &talk.last {
                Some(stats) => summary(stats, talk.engine.load_time().as_secs_f64()),
                None => println!("nothing was answered yet"),
            },
            "/retry" => {
                if talk.messages.last().is_some_and(|m| m.role == "assistant") {
                    talk.messages.pop();
                }
                if talk.messages.is_empty() {
                    println!("there is nothing to answer again");
                } else {
                    talk.try_to_answer(options.n_predict, &interrupted)?;
                }
            }
            command if command.starts_with('/') => println!("{command} is not known\n{HELP}"),
            _ => {
                talk.messages.push(Message::new("user", text));
                talk.try_to_answer(options.n_predict, &interrupted)?;
            }
        }
    }
}

fn read(editor: &mut rustyline::DefaultEditor) -> rustyline::Result<String> {
    let mut text = editor.readline("> ")?;
    while text.ends_with('\\') {
        text.pop();
        text.push('\n');
        match editor.readline("… ") {
            Ok(line) => text.push_str(&line),
            // The end of the input ends the message too.
            Err(ReadlineError::Eof) => break,
            Err(error) => return Err(error),
        }
    }
    if !text.trim().is_empty() {
        editor.add_history_entry(&text)?;
    }
    Ok(text)
}

impl Conversation {
    /// Answers the last message, or tells why not and takes it back; only a terminal that went
    /// away ends the conversation.
    fn try_to_answer(&mut self, limit: usize, interrupted: &AtomicBool) -> Outcome {
        let Err(error) = self.answer(limit, interrupted) else {
            return Ok(());
        };
        self.cached.truncate(self.engine.position());
        self.messages.pop();
        if error.is::<std::io::Error>() {
            return Err(error);
        }
        eprintln!("error: {error}");
        Ok(())
    }

    /// Answers the last message; drops the oldest exchanges where the context is too short.
    fn answer(&mut self, limit: usize, interrupted: &AtomicBool) -> Outcome {
        let tokens = self.fitting_tokens()?;
        // What the cache already holds need not be computed again; the last token always is.
        let same = tokens
            .iter()
            .zip(&self.cached)
            .take_while(|(a, b)| a == b)
            .count()
            .min(tokens.len().saturating_sub(1));
        self.engine.rewind(same);
        self.cached.truncate(same);
        self.cached.extend_from_slice(&tokens[same..]);
        interrupted.store(false, Relaxed);
        let source = self.engine.source().clone();
        let (mut stream, mut reply, cached) = (TextStream::new(), String::new(), &mut self.cached);
        let (mut piece, mut out) = (String::new(), std::io::stdout().lock());
        let stats = generate(
            &mut self.engine,
            &mut self.sampler,
            &tokens[same..],
            limit,
            interrupted,
            |token| {
                cached.push(token);
                piece.clear();
                stream.push_token(&source.tokenizer, token, &mut piece);
                reply.push_str(&piece);
                let shown = out.write_all(piece.as_bytes()).and_then(|()| out.flush());
                if interrupted.load(Relaxed) || shown.is_err() {
                    ControlFlow::Break(())
                } else {
                    ControlFlow::Continue(())
                }
            },
        )?;
        // The last token was chosen but not yet computed.
        self.cached.truncate(self.engine.position());
        piece.clear();
        stream.finish(&mut piece);
        reply.push_str(&piece);
        writeln!(out, "{piece}")?;
        if stats.stop == Stop::Context {
            writeln!(
                out,
                "[the context is full; /reset starts anew, --context makes it longer]"
            )?;
        }
        self.messages
            .push(Message::new("assistant", reply.trim_end()));
        self.last = Some(stats);
        Ok(())
    }

    fn fitting_tokens(&mut self) -> Outcome<Vec<u32>> {
        loop {
            let system = self.system.iter().map(|text| Message::new("system", text));
            let messages: Vec<Message> = system.chain(self.messages.iter().cloned()).collect();
            let tokens = self
                .engine
                .source()
                .chat_tokens(&self.template, &messages)?;
            let context = self.engine.plan().context;
            // Leave a quarter for the answer.
            if tokens.len() <= context / 4 * 3
                || (self.messages.len() < 3 && tokens.len() < context)
            {
                return Ok(tokens);
            }
            if self.messages.len() < 3 {
                return Err(format!(
                    "the message has {} tokens, the context {context}; see --context",
                    tokens.len()
                )
                .into());
            }
            self.messages.drain(..2);
            println!("[the oldest exchange was dropped to fit the context]");
        }
    }
}
