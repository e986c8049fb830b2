//! Chat templates give the text that Jinja2 gives, and none hangs or overflows.
//!
//! `tests/data/golden/tokens.py` wrote the texts. `MYQ_MODELS` names a folder with the GGUF
//! files whose own templates are tried.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use myq_format::gguf::Gguf;
use myq_model::template::{ChatTemplate, Message, TemplateError};
use serde_json::Value;

fn golden() -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/data/golden/templates.json");
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// Renders every case of a template and compares.
fn compare(name: &str, source: &str, cases: &Value) {
    let template =
        ChatTemplate::new(source, "<s>", "</s>").unwrap_or_else(|e| panic!("{name}: {e}"));
    for case in cases.as_array().unwrap() {
        let messages: Vec<Message> = case["messages"]
            .as_array()
            .unwrap()
            .iter()
            .map(|m| Message::new(m[0].as_str().unwrap(), m[1].as_str().unwrap()))
            .collect();
        let prompt = case["add_generation_prompt"].as_bool().unwrap();
        match (template.render(&messages, prompt), &case["refused"]) {
            (Ok(text), Value::Null) => assert_eq!(text, case["text"].as_str().unwrap(), "{name}"),
            (Err(TemplateError::Refused(why)), want) => {
                assert_eq!(why, want.as_str().unwrap_or(""), "{name}")
            }
            (got, _) => panic!("{name}: {got:?} for {case}"),
        }
    }
}

#[test]
fn texts_are_those_of_jinja2() {
    for (name, own) in golden()["own"].as_object().unwrap() {
        compare(name, own["source"].as_str().unwrap(), &own["cases"]);
    }
}

#[test]
fn texts_of_real_models_are_those_of_jinja2() {
    let Some(models) = std::env::var_os("MYQ_MODELS").map(PathBuf::from) else {
        println!("skipped: MYQ_MODELS is not set");
        return;
    };
    for (name, cases) in golden()["models"].as_object().unwrap() {
        let Ok(bytes) = std::fs::read(models.join(name)) else {
            println!("skipped: {name} is not in MYQ_MODELS");
            continue;
        };
        let file = Gguf::parse(&bytes).unwrap();
        compare(name, file.str("tokenizer.chat_template").unwrap(), cases);
        println!("{name}: equal");
    }
}

fn render(source: &str) -> Result<String, TemplateError> {
    let messages = [Message::new("user", "hi")];
    ChatTemplate::new(source, "<s>", "</s>").and_then(|template| template.render(&messages, true))
}

#[test]
fn bombs_end_with_an_error() {
    let nest = |open: &str, count: usize, close: &str| {
        format!("{{{{ {}1{} }}}}", open.repeat(count), close.repeat(count))
    };
    let grow = |value: &str| {
        format!(
            "{{% set ns = namespace(x='abcdefgh', l=[1]) %}}{{% for i in range(90000) %}}\
             {{% set ns.x = {value} %}}{{% endfor %}}"
        )
    };
    let bombs = [
        "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}".to_owned(),
        "{% for i in range(99999) %}{% for j in range(99999) %}{{ i }}{% endfor %}{% endfor %}"
            .to_owned(),
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}".to_owned(),
        grow("ns.x ~ ns.x"),
        grow("ns.x + ns.x"),
        grow("ns.x.replace('a', 'aaaaaaaa')"),
        grow("ns.x | replace('a', 'aaaaaaaa')"),
        grow("[ns.x]") + "{{ ns.x }}",
        grow("{'a': ns.x}") + "{{ ns.x | tojson }}",
        "{% set ns = namespace() %}{% set ns.x = ns %}{{ ns }}".to_owned(),
        "{% set ns = namespace() %}{% set ns.x = [ns] %}{{ ns | tojson }}".to_owned(),
        format!("{}{{{{ x }}}}", "{% set x = [x, x] %}".repeat(60)),
        "{{ 'a' * 4000000000 }}".to_owned(),
        "{{ '{:999999999}'.format(3) }}".to_owned(),
        "{{ '{:{}}'.format(3, 999999999) }}".to_owned(),
        "{{ 'a\na' | indent(999999999) }}".to_owned(),
        "{{ range(1000000000000) }}".to_owned(),
        nest("(", 20_000, ")"),
        nest("[", 20_000, "]"),
        "{% if true %}".repeat(9_000),
        format!("{{{{ undefined{} }}}}", ".b".repeat(60_000)),
        "x".repeat(200_000),
    ];
    for bomb in &bombs {
        let start = Instant::now();
        let shown: String = bomb.chars().take(60).collect();
        let error = render(bomb).expect_err(&shown).to_string();
        assert!(
            error.contains("chat template") && error.len() < 400,
            "{error}"
        );
        assert!(
            start.elapsed() < Duration::from_secs(20),
            "{shown}: {:?}",
            start.elapsed()
        );
    }
    // Deep, but harmless.
    assert_eq!(render(&nest("-", 120_000, "")).unwrap(), "1");
    assert_eq!(render(&nest("not ", 30_000, "")).unwrap(), "True");
    assert_eq!(
        render(&format!("{{{{ 1{} }}}}", " + 1".repeat(30_000))).unwrap(),
        "30001"
    );
}

#[test]
fn errors_say_what_and_where() {
    let message = |source: &str| render(source).unwrap_err().to_string();
    let syntax = message("a\n{% if %}");
    assert!(
        syntax.contains("cannot be read, line 2: syntax error"),
        "{syntax}"
    );
    let unknown = message("\n\n{{ nothing() }}");
    assert!(
        unknown.contains("fails at line 3") && unknown.contains("nothing"),
        "{unknown}"
    );
    let refused = message("{{ raise_exception('only user and assistant') }}");
    assert_eq!(
        refused,
        "the model's chat template refuses these messages: only user and assistant"
    );
    assert!(message("{{ strftime_now('%Q') }}").contains("unknown directive"));
    assert!(render("{{ strftime_now('%d %B %Y') }}").unwrap().len() > 10);
}

#[test]
fn long_conversations_fit_the_budget() {
    let messages: Vec<Message> = (0..400)
        .map(|i| {
            Message::new(
                if i % 2 == 0 { "user" } else { "assistant" },
                "word ".repeat(2_000),
            )
        })
        .collect();
    for name in ["chatml", "llama3", "mistral"] {
        let golden = golden();
        let source = golden["own"][name]["source"].as_str().unwrap();
        let text = ChatTemplate::new(source, "<s>", "</s>")
            .unwrap()
            .render(&messages, true)
            .unwrap();
        assert!(text.len() > 400 * 9_999, "{name}");
    }
}
