//! Text from tokens as they come: no half characters.

use super::Tokenizer;

/// Puts the bytes of successive tokens together to whole characters.
///
/// A character may be spread over several tokens (Chinese characters and emoji often are);
/// its bytes wait here until it is complete. Bytes that cannot become a character come out
/// as U+FFFD, one for each maximal invalid sequence, as `String::from_utf8_lossy` does it.
#[derive(Clone, Debug, Default)]
pub struct TextStream {
    /// The beginning of a character, at most three bytes between calls.
    pending: Vec<u8>,
}

impl TextStream {
    /// A stream at the start of a text.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes bytes, and appends the characters that are now complete to `out`.
    pub fn push(&mut self, bytes: &[u8], out: &mut String) {
        self.pending.extend_from_slice(bytes);
        let mut rest = self.pending.as_slice();
        loop {
            let error = match std::str::from_utf8(rest) {
                Ok(text) => {
                    out.push_str(text);
                    rest = &[];
                    break;
                }
                Err(error) => error,
            };
            let (valid, after) = rest.split_at(error.valid_up_to());
            // Valid by the line above; the lossy form of valid text borrows it.
            out.push_str(&String::from_utf8_lossy(valid));
            rest = after;
            let Some(invalid) = error.error_len() else {
                break;
            };
            out.push(char::REPLACEMENT_CHARACTER);
            rest = &rest[invalid..];
        }
        let kept = self.pending.len() - rest.len();
        self.pending.drain(..kept);
    }

    /// As [`TextStream::push`], with the bytes of a token.
    pub fn push_token(&mut self, tokenizer: &Tokenizer, id: u32, out: &mut String) {
        self.push(tokenizer.token_bytes(id), out);
    }

    /// Ends the text: the beginning of a character that never came becomes U+FFFD.
    pub fn finish(&mut self, out: &mut String) {
        if !self.pending.is_empty() {
            out.push(char::REPLACEMENT_CHARACTER);
            self.pending.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Feeds `bytes` in pieces of `step`; every output must be whole characters by type.
    fn stream(bytes: &[u8], step: usize) -> String {
        let (mut stream, mut out) = (TextStream::new(), String::new());
        for piece in bytes.chunks(step) {
            stream.push(piece, &mut out);
            assert!(stream.pending.len() < 4);
        }
        stream.finish(&mut out);
        out
    }

    #[test]
    fn characters_come_whole() {
        let text = "naïve 你好，世界 👩‍👩‍👧‍👦 🇨🇭 e\u{301}\r\n";
        for step in 1..8 {
            assert_eq!(stream(text.as_bytes(), step), text);
        }
        let (mut stream, mut out) = (TextStream::new(), String::new());
        stream.push("好".as_bytes().split_at(2).0, &mut out);
        assert_eq!(out, "");
        stream.push("好".as_bytes().split_at(2).1, &mut out);
        assert_eq!(out, "好");
    }

    #[test]
    fn invalid_bytes_become_one_mark_each() {
        let cases: [&[u8]; 6] = [
            b"a\xFFb",
            b"\xE4\xBDx",
            b"\xF0\x9F\x98",
            b"\xC0\x80",
            b"\xED\xA0\x80",
            b"ok \xE4\xBD\xA0\x80\x80 ok",
        ];
        for bytes in cases {
            for step in 1..5 {
                assert_eq!(
                    stream(bytes, step),
                    String::from_utf8_lossy(bytes),
                    "{bytes:?}"
                );
            }
        }
    }
}
