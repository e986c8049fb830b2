//! Metadata values of a GGUF file, as views into its bytes.

use crate::Error;
use crate::cursor::Cursor;

/// Deepest nesting of arrays; published files have none.
const MAX_DEPTH: u32 = 8;
/// Most elements of one array: some hundred times the largest vocabulary.
const MAX_ARRAY: u64 = 1 << 26;

/// The types a metadata value can have, with their numbers in the file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[allow(missing_docs, reason = "the names are those of Rust's own types")]
pub enum ValueType {
    U8 = 0,
    I8 = 1,
    U16 = 2,
    I16 = 3,
    U32 = 4,
    I32 = 5,
    F32 = 6,
    Bool = 7,
    String = 8,
    Array = 9,
    U64 = 10,
    I64 = 11,
    F64 = 12,
}

impl ValueType {
    fn from_id(id: u32) -> Option<Self> {
        use ValueType::*;
        const ALL: [ValueType; 13] = [
            U8, I8, U16, I16, U32, I32, F32, Bool, String, Array, U64, I64, F64,
        ];
        ALL.get(usize::try_from(id).ok()?).copied()
    }

    /// Fewest bytes a value takes; the exact size for all but strings and arrays.
    fn min_bytes(self) -> u64 {
        match self {
            ValueType::U8 | ValueType::I8 | ValueType::Bool => 1,
            ValueType::U16 | ValueType::I16 => 2,
            ValueType::U32 | ValueType::I32 | ValueType::F32 => 4,
            ValueType::U64 | ValueType::I64 | ValueType::F64 | ValueType::String => 8,
            ValueType::Array => 12,
        }
    }

    fn is_integer(self) -> bool {
        use ValueType::*;
        matches!(self, U8 | I8 | U16 | I16 | U32 | I32 | U64 | I64)
    }
}

/// A string value. Vocabularies may hold any bytes, so UTF-8 is checked when asked for.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Str<'a>(pub &'a [u8]);

impl<'a> Str<'a> {
    /// The bytes as they stand in the file.
    pub fn bytes(self) -> &'a [u8] {
        self.0
    }

    /// The text, or [`Error::StringNotUtf8`].
    pub fn to_str(self) -> Result<&'a str, Error> {
        std::str::from_utf8(self.0).map_err(|e| Error::StringNotUtf8 {
            shown: String::from_utf8_lossy(&self.0[..self.0.len().min(64)]).into_owned(),
            at: e.valid_up_to(),
        })
    }
}

impl std::fmt::Debug for Str<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}", String::from_utf8_lossy(self.0))
    }
}

/// A metadata value.
#[derive(Clone, Copy, PartialEq, Debug)]
#[allow(missing_docs, reason = "the names are those of Rust's own types")]
pub enum Value<'a> {
    U8(u8),
    I8(i8),
    U16(u16),
    I16(i16),
    U32(u32),
    I32(i32),
    F32(f32),
    Bool(bool),
    String(Str<'a>),
    Array(Array<'a>),
    U64(u64),
    I64(i64),
    F64(f64),
}

impl<'a> Value<'a> {
    /// The type of the value.
    pub fn value_type(&self) -> ValueType {
        match self {
            Value::U8(_) => ValueType::U8,
            Value::I8(_) => ValueType::I8,
            Value::U16(_) => ValueType::U16,
            Value::I16(_) => ValueType::I16,
            Value::U32(_) => ValueType::U32,
            Value::I32(_) => ValueType::I32,
            Value::F32(_) => ValueType::F32,
            Value::Bool(_) => ValueType::Bool,
            Value::String(_) => ValueType::String,
            Value::Array(_) => ValueType::Array,
            Value::U64(_) => ValueType::U64,
            Value::I64(_) => ValueType::I64,
            Value::F64(_) => ValueType::F64,
        }
    }

    /// The number, if this is an integer of any width.
    pub fn as_integer(&self) -> Option<i128> {
        match *self {
            Value::U8(v) => Some(v.into()),
            Value::I8(v) => Some(v.into()),
            Value::U16(v) => Some(v.into()),
            Value::I16(v) => Some(v.into()),
            Value::U32(v) => Some(v.into()),
            Value::I32(v) => Some(v.into()),
            Value::U64(v) => Some(v.into()),
            Value::I64(v) => Some(v.into()),
            _ => None,
        }
    }

    /// The number, if this is a floating-point value.
    pub fn as_float(&self) -> Option<f64> {
        match *self {
            Value::F32(v) => Some(v.into()),
            Value::F64(v) => Some(v),
            _ => None,
        }
    }

    /// The text, if this is a string of UTF-8.
    pub fn as_str(&self) -> Option<&'a str> {
        match self {
            Value::String(s) => s.to_str().ok(),
            _ => None,
        }
    }

    /// Appends the payload as the file has it, without the type number.
    pub(crate) fn encode(&self, out: &mut Vec<u8>) {
        match *self {
            Value::U8(v) => out.push(v),
            Value::I8(v) => out.extend(v.to_le_bytes()),
            Value::U16(v) => out.extend(v.to_le_bytes()),
            Value::I16(v) => out.extend(v.to_le_bytes()),
            Value::U32(v) => out.extend(v.to_le_bytes()),
            Value::I32(v) => out.extend(v.to_le_bytes()),
            Value::F32(v) => out.extend(v.to_le_bytes()),
            Value::Bool(v) => out.push(v.into()),
            Value::String(Str(v)) => {
                out.extend((v.len() as u64).to_le_bytes());
                out.extend(v);
            }
            Value::Array(a) => {
                out.extend((a.element as u32).to_le_bytes());
                out.extend((a.len as u64).to_le_bytes());
                out.extend(a.bytes);
            }
            Value::U64(v) => out.extend(v.to_le_bytes()),
            Value::I64(v) => out.extend(v.to_le_bytes()),
            Value::F64(v) => out.extend(v.to_le_bytes()),
        }
    }
}

/// An array, checked once and decoded as it is walked.
///
/// A vocabulary has 150,000 strings; a `Vec` of them would cost more than the rest of
/// loading. Each typed iterator is `None` where the elements have another type.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Array<'a> {
    element: ValueType,
    len: usize,
    bytes: &'a [u8],
}

impl<'a> Array<'a> {
    /// Type of all elements.
    pub fn element_type(&self) -> ValueType {
        self.element
    }

    /// Number of elements.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The elements' bytes as they stand in the file.
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// The strings of an array of strings.
    pub fn strings(&self) -> Option<impl Iterator<Item = Str<'a>> + use<'a>> {
        let strings = self.values().filter_map(|v| match v {
            Value::String(s) => Some(s),
            _ => None,
        });
        (self.element == ValueType::String).then_some(strings)
    }

    /// The numbers of an array of `f32`.
    pub fn f32s(&self) -> Option<impl ExactSizeIterator<Item = f32> + use<'a>> {
        self.words(ValueType::F32, f32::from_le_bytes)
    }

    /// The numbers of an array of `i32`.
    pub fn i32s(&self) -> Option<impl ExactSizeIterator<Item = i32> + use<'a>> {
        self.words(ValueType::I32, i32::from_le_bytes)
    }

    /// The numbers of an array of `u32`.
    pub fn u32s(&self) -> Option<impl ExactSizeIterator<Item = u32> + use<'a>> {
        self.words(ValueType::U32, u32::from_le_bytes)
    }

    /// The numbers of an array of integers of any width.
    pub fn integers(&self) -> Option<impl Iterator<Item = i128> + use<'a>> {
        let integers = self.values().filter_map(|v| v.as_integer());
        self.element.is_integer().then_some(integers)
    }

    /// The truth values of an array of them.
    pub fn bools(&self) -> Option<impl ExactSizeIterator<Item = bool> + use<'a>> {
        (self.element == ValueType::Bool).then(|| self.bytes.iter().map(|&b| b != 0))
    }

    /// The elements, whatever their type; of nested arrays too.
    pub fn values(&self) -> Values<'a> {
        Values {
            element: self.element,
            left: self.len,
            cursor: Cursor::new(self.bytes),
        }
    }

    fn words<T>(
        &self,
        element: ValueType,
        decode: fn([u8; 4]) -> T,
    ) -> Option<impl ExactSizeIterator<Item = T> + use<'a, T>> {
        let (words, _) = self.bytes.as_chunks::<4>();
        (self.element == element).then(|| words.iter().map(move |w| decode(*w)))
    }
}

/// Iterator over the elements of an [`Array`].
#[derive(Clone, Debug)]
pub struct Values<'a> {
    element: ValueType,
    left: usize,
    cursor: Cursor<'a>,
}

impl<'a> Iterator for Values<'a> {
    type Item = Value<'a>;

    fn next(&mut self) -> Option<Value<'a>> {
        self.left = self.left.checked_sub(1)?;
        // The parser has walked these bytes once, so this cannot fail.
        read(&mut self.cursor, self.element, "", 0).ok()
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left, Some(self.left))
    }
}

/// Reads the value of `key` with its type number before it.
pub(super) fn read_typed<'a>(cursor: &mut Cursor<'a>, key: &str) -> Result<Value<'a>, Error> {
    let value_type = read_type(cursor, key)?;
    read(cursor, value_type, key, 0)
}

/// Reads the length and bytes of a string.
pub(super) fn read_bytes<'a>(
    cursor: &mut Cursor<'a>,
    what: &'static str,
) -> Result<&'a [u8], Error> {
    let len = cursor.u64(what)?;
    cursor.take(len, what)
}

fn read_type(cursor: &mut Cursor<'_>, key: &str) -> Result<ValueType, Error> {
    let offset = cursor.offset();
    let id = cursor.u32("a value type")?;
    ValueType::from_id(id).ok_or_else(|| Error::UnknownValueType {
        key: key.to_owned(),
        id,
        offset,
    })
}

fn read<'a>(
    cursor: &mut Cursor<'a>,
    value_type: ValueType,
    key: &str,
    depth: u32,
) -> Result<Value<'a>, Error> {
    const WHAT: &str = "a metadata value";
    Ok(match value_type {
        ValueType::U8 => Value::U8(cursor.u8(WHAT)?),
        ValueType::I8 => Value::I8(cursor.u8(WHAT)?.cast_signed()),
        ValueType::U16 => Value::U16(cursor.u16(WHAT)?),
        ValueType::I16 => Value::I16(cursor.u16(WHAT)?.cast_signed()),
        ValueType::U32 => Value::U32(cursor.u32(WHAT)?),
        ValueType::I32 => Value::I32(cursor.u32(WHAT)?.cast_signed()),
        ValueType::F32 => Value::F32(f32::from_bits(cursor.u32(WHAT)?)),
        ValueType::Bool => {
            let offset = cursor.offset();
            Value::Bool(truth(cursor.u8(WHAT)?, key, offset)?)
        }
        ValueType::String => Value::String(Str(read_bytes(cursor, "a string value")?)),
        ValueType::Array => Value::Array(read_array(cursor, key, depth)?),
        ValueType::U64 => Value::U64(cursor.u64(WHAT)?),
        ValueType::I64 => Value::I64(cursor.u64(WHAT)?.cast_signed()),
        ValueType::F64 => Value::F64(f64::from_bits(cursor.u64(WHAT)?)),
    })
}

fn truth(value: u8, key: &str, offset: u64) -> Result<bool, Error> {
    match value {
        0 | 1 => Ok(value == 1),
        _ => Err(Error::BadBool {
            key: key.to_owned(),
            value,
            offset,
        }),
    }
}

/// Reads an array: element type, count, elements. Walks the elements, so that later walks
/// need no checks, but keeps none.
fn read_array<'a>(cursor: &mut Cursor<'a>, key: &str, depth: u32) -> Result<Array<'a>, Error> {
    const WHAT: &str = "an array";
    if depth >= MAX_DEPTH {
        let offset = cursor.offset();
        return Err(Error::TooDeep {
            key: key.to_owned(),
            limit: MAX_DEPTH,
            offset,
        });
    }
    let element = read_type(cursor, key)?;
    let offset = cursor.offset();
    let count = cursor.u64(WHAT)?;
    if count > MAX_ARRAY {
        let what = "elements of an array";
        return Err(Error::TooMany {
            what,
            count,
            limit: MAX_ARRAY,
            offset,
        });
    }
    // No overflow: at most 2^26 elements, times at most 12.
    if count * element.min_bytes() > cursor.rest() {
        return Err(Error::CountBeyondFile {
            what: WHAT,
            count,
            offset,
            rest: cursor.rest(),
        });
    }
    let start = cursor.offset();
    match element {
        ValueType::String | ValueType::Array => {
            for _ in 0..count {
                read(cursor, element, key, depth + 1)?;
            }
        }
        _ => {
            let bytes = cursor.take(count * element.min_bytes(), WHAT)?;
            if element == ValueType::Bool {
                for (at, &value) in (start..).zip(bytes) {
                    truth(value, key, at)?;
                }
            }
        }
    }
    let len = usize::try_from(count).unwrap_or(usize::MAX);
    Ok(Array {
        element,
        len,
        bytes: cursor.since(start),
    })
}
