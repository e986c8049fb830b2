//! Reading little-endian numbers off a slice, with the offset for messages.

use crate::Error;

/// A position in the bytes of a file. No read moves past the end.
#[derive(Clone, Debug)]
pub(crate) struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Cursor { bytes, at: 0 }
    }

    /// Bytes from the start of the slice.
    pub(crate) fn offset(&self) -> u64 {
        self.at as u64
    }

    /// Bytes not yet read.
    pub(crate) fn rest(&self) -> u64 {
        (self.bytes.len() - self.at) as u64
    }

    /// What was read since `start`, an earlier [`Cursor::offset`].
    pub(crate) fn since(&self, start: u64) -> &'a [u8] {
        usize::try_from(start)
            .ok()
            .and_then(|s| self.bytes.get(s..self.at))
            .unwrap_or(&[])
    }

    /// The next `need` bytes; `what` names them in the error.
    pub(crate) fn take(&mut self, need: u64, what: &'static str) -> Result<&'a [u8], Error> {
        let end = usize::try_from(need)
            .ok()
            .and_then(|n| self.at.checked_add(n));
        match end.and_then(|end| self.bytes.get(self.at..end)) {
            Some(taken) => {
                self.at += taken.len();
                Ok(taken)
            }
            None => Err(self.truncated(need, what)),
        }
    }

    fn truncated(&self, need: u64, what: &'static str) -> Error {
        Error::Truncated {
            what,
            offset: self.offset(),
            need,
            file: self.bytes.len() as u64,
        }
    }

    fn chunk<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N], Error> {
        match self
            .bytes
            .get(self.at..)
            .and_then(|rest| rest.first_chunk::<N>())
        {
            Some(chunk) => {
                self.at += N;
                Ok(*chunk)
            }
            None => Err(self.truncated(N as u64, what)),
        }
    }

    pub(crate) fn u8(&mut self, what: &'static str) -> Result<u8, Error> {
        self.chunk(what).map(u8::from_le_bytes)
    }

    pub(crate) fn u16(&mut self, what: &'static str) -> Result<u16, Error> {
        self.chunk(what).map(u16::from_le_bytes)
    }

    pub(crate) fn u32(&mut self, what: &'static str) -> Result<u32, Error> {
        self.chunk(what).map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self, what: &'static str) -> Result<u64, Error> {
        self.chunk(what).map(u64::from_le_bytes)
    }
}

/// `n` rounded up to a multiple of `alignment` (a power of two); `None` beyond 64 bits.
pub(crate) fn align_up(n: u64, alignment: u64) -> Option<u64> {
    n.checked_next_multiple_of(alignment)
}
