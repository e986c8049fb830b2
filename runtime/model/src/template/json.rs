//! The filter `tojson` as the reference library has it, Python's `json.dumps`; and printing.

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, Output, State, Value, escape_formatter};

/// Depth of nested lists and dictionaries.
const DEPTH: usize = 64;

/// `tojson(value, indent=None)`: order of keys kept, `, ` and `: ` between, nothing escaped
/// beyond what JSON asks for.
pub(super) fn tojson(state: &State, value: Value, options: Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = options.get("indent")?;
    let ascii: Option<bool> = options.get("ensure_ascii")?;
    options.assert_all_used()?;
    if ascii == Some(true) {
        return Err(invalid("tojson(ensure_ascii=true) is not supported"));
    }
    let mut writer = Writer {
        state,
        indent: indent.map(|columns| columns.min(16)),
        out: String::new(),
    };
    writer.write(&value, 0)?;
    Ok(writer.out)
}

/// What `{{ value }}` writes. Lists and dictionaries are written as JSON, metered, where the
/// engine's own way would follow a value that contains itself without end.
pub(super) fn print(out: &mut Output, state: &mut State, value: &Value) -> Result<(), Error> {
    match value.kind() {
        ValueKind::Map | ValueKind::Seq | ValueKind::Iterable | ValueKind::Plain => {
            let mut writer = Writer {
                state,
                indent: None,
                out: String::new(),
            };
            writer.write(value, 0)?;
            out.write_str(&writer.out).map_err(Error::from)
        }
        _ => escape_formatter(out, state, value),
    }
}

fn invalid(what: &'static str) -> Error {
    Error::new(ErrorKind::InvalidOperation, what)
}

struct Writer<'s, 'a, 'b> {
    state: &'s State<'a, 'b>,
    indent: Option<usize>,
    out: String,
}

impl Writer<'_, '_, '_> {
    fn write(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > DEPTH {
            return Err(invalid("the value is nested too deep to be written"));
        }
        self.state.consume_fuel(1)?;
        match value.kind() {
            ValueKind::Undefined | ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self
                .out
                .push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.out.push_str(&value.to_string()),
            ValueKind::String => self.string(value)?,
            ValueKind::Map => self.map(value, depth)?,
            ValueKind::Seq | ValueKind::Iterable => self.list(value, depth)?,
            _ => return Err(invalid("the value has no written form")),
        }
        Ok(())
    }

    fn string(&mut self, value: &Value) -> Result<(), Error> {
        let text = value.as_str().unwrap_or_default();
        self.state.consume_fuel(text.len() as u64 / 64)?;
        let quoted = serde_json::to_string(text);
        self.out
            .push_str(&quoted.map_err(|_| invalid("tojson: the text cannot be written"))?);
        Ok(())
    }

    fn list(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        self.out.push('[');
        let mut count = 0;
        for item in value.try_iter()? {
            self.separate(count, depth + 1);
            self.write(&item, depth + 1)?;
            count += 1;
        }
        self.close(count, depth, ']');
        Ok(())
    }

    fn map(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        self.out.push('{');
        let mut count = 0;
        for key in value.try_iter()? {
            self.separate(count, depth + 1);
            self.string(&Value::from(key.to_string()))?;
            self.out.push_str(": ");
            self.write(&value.get_item(&key)?, depth + 1)?;
            count += 1;
        }
        self.close(count, depth, '}');
        Ok(())
    }

    /// What stands before an item.
    fn separate(&mut self, before: usize, depth: usize) {
        if before > 0 {
            self.out
                .push_str(if self.indent.is_some() { "," } else { ", " });
        }
        self.line(depth);
    }

    fn close(&mut self, count: usize, depth: usize, bracket: char) {
        if count > 0 {
            self.line(depth);
        }
        self.out.push(bracket);
    }

    fn line(&mut self, depth: usize) {
        if let Some(columns) = self.indent {
            self.out.push('\n');
            self.out.extend(std::iter::repeat_n(' ', columns * depth));
        }
    }
}
