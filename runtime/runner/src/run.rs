//! `runner run`: one prompt, one answer.

use std::io::{Read, Write};
use std::ops::ControlFlow;
use std::sync::atomic::AtomicBool;

use myq_engine::{Stats, Stop, generate};
use myq_model::Sampler;
use myq_model::template::Message;
use myq_model::tokenizer::{TextStream, encode_prompt};

use crate::args::Run;
use crate::load::{self, Outcome};

pub(crate) fn run(options: &Run) -> Outcome {
    let settings = options.sampling.settings()?;
    let prompt = prompt_text(&options.prompt)?;
    let mut engine = load::open(&options.model)?;
    let template = if options.raw {
        None
    } else {
        engine.source().template()?
    };
    if template.is_none() && options.system.is_some() {
        return Err(
            "--system needs a chat template, and this model has none; put the text into --prompt"
                .into(),
        );
    }
    let tokens = match &template {
        Some(template) => {
            let system = options
                .system
                .iter()
                .map(|text| Message::new("system", text));
            let messages: Vec<Message> = system.chain([Message::new("user", &prompt)]).collect();
            engine.source().chat_tokens(template, &messages)?
        }
        None => encode_prompt(&engine.source().tokenizer, &prompt, false),
    };
    let vocab = engine.source().config.vocab;
    let mut sampler = Sampler::new(settings, vocab);
    let mut stream = TextStream::new();
    let (mut text, mut piece, mut out) = (String::new(), String::new(), std::io::stdout().lock());
    let source = engine.source().clone();
    let mut failed = None;
    let stats = generate(
        &mut engine,
        &mut sampler,
        &tokens,
        options.n_predict,
        &AtomicBool::new(false),
        |token| {
            piece.clear();
            stream.push_token(&source.tokenizer, token, &mut piece);
            if options.json {
                text.push_str(&piece);
                return ControlFlow::Continue(());
            }
            match out.write_all(piece.as_bytes()).and_then(|()| out.flush()) {
                Ok(()) => ControlFlow::Continue(()),
                // The reader went away, as `runner … | head` does.
                Err(error) => {
                    failed = Some(error);
                    ControlFlow::Break(())
                }
            }
        },
    )?;
    if let Some(error) = failed {
        return Err(error.into());
    }
    piece.clear();
    stream.finish(&mut piece);
    if options.json {
        text.push_str(&piece);
        writeln!(
            out,
            "{}",
            as_json(&text, &stats, engine.load_time().as_secs_f64())
        )?;
    } else {
        writeln!(out, "{piece}")?;
        summary(&stats, engine.load_time().as_secs_f64());
    }
    Ok(())
}

fn prompt_text(prompt: &str) -> Outcome<String> {
    if prompt != "-" {
        return Ok(prompt.to_owned());
    }
    let mut text = String::new();
    std::io::stdin()
        .read_to_string(&mut text)
        .map_err(|e| format!("cannot read the prompt from standard input: {e}"))?;
    Ok(text)
}

/// One line of figures on standard error.
pub(crate) fn summary(stats: &Stats, load: f64) {
    let decode = stats
        .decode_rate()
        .map_or_else(String::new, |r| format!(", {r:.1} tokens/s"));
    eprintln!(
        "[loaded in {load:.2} s; prompt {} tokens, {:.0} tokens/s; {} tokens{decode}{}]",
        stats.prompt_tokens,
        stats.prompt_rate(),
        stats.tokens,
        match stats.stop {
            Stop::Context => "; stopped: the context is full, see --context",
            Stop::Length => "; stopped at --n-predict",
            Stop::End | Stop::Receiver => "",
        }
    );
}

fn as_json(text: &str, stats: &Stats, load: f64) -> serde_json::Value {
    serde_json::json!({
        "text": text,
        "stop": match stats.stop {
            Stop::End => "end",
            Stop::Length => "length",
            Stop::Context => "context",
            Stop::Receiver => "receiver",
        },
        "load_seconds": load,
        "prompt_tokens": stats.prompt_tokens,
        "prompt_seconds": stats.prompt_time.as_secs_f64(),
        "prompt_tokens_per_second": stats.prompt_rate(),
        "tokens": stats.tokens,
        "decode_tokens_per_second": stats.decode_rate(),
    })
}
