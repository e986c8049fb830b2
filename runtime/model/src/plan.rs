//! The byte budget of a run, before anything is allocated.

use crate::cache::tile;
use crate::state::{PARTIAL_COLUMNS, PARTIAL_ROWS};
use crate::{CacheType, Config};
use myq_blocks::layout::SUPER;

/// How the input of a matrix is rounded before it is multiplied.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Activations {
    /// 8 bits, a scale for each 32 values.
    #[default]
    Int8,
    /// Two 8-bit planes, the second for what the first leaves: about 15 bits.
    Int8x2,
    /// Two planes for up to [`FEW`] tokens, one for more: where decoding waits for memory, the
    /// second plane costs nothing.
    Mixed,
}

/// Tokens that [`Activations::Mixed`] gives two planes: what a decode step or a check of a draft has.
pub const FEW: usize = 8;

impl Activations {
    /// All forms by name.
    pub const NAMES: [(&'static str, Activations); 3] = [
        ("int8", Activations::Int8),
        ("int8x2", Activations::Int8x2),
        ("mixed", Activations::Mixed),
    ];

    /// The form with this name.
    pub fn from_name(name: &str) -> Option<Activations> {
        Self::NAMES
            .iter()
            .find(|(n, _)| *n == name)
            .map(|(_, a)| *a)
    }

    /// 8-bit columns of each of `tokens` tokens.
    pub fn planes(self, tokens: usize) -> usize {
        match self {
            Activations::Int8 => 1,
            Activations::Mixed if tokens > FEW => 1,
            Activations::Int8x2 | Activations::Mixed => 2,
        }
    }

    /// 8-bit columns of a batch of up to `tokens` tokens.
    pub fn columns(self, tokens: usize) -> usize {
        match self {
            Activations::Mixed => tokens.max(2 * tokens.min(FEW)),
            other => tokens * other.planes(tokens),
        }
    }
}

/// Sizes that fix every buffer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Plan {
    /// Tokens that the cache holds.
    pub context: usize,
    /// How the cache stores keys and values.
    pub cache: CacheType,
    /// Most tokens in one pass.
    pub batch: usize,
    /// Most tokens of a pass that get logits.
    pub logit_rows: usize,
    /// Threads that compute.
    pub threads: usize,
    /// How the input of a matrix is rounded.
    pub activations: Activations,
}

impl Plan {
    /// Bytes of the key and value cache: `2 · layers · kv_heads · head_dim · context · bytes`.
    pub fn kv_bytes(&self, c: &Config) -> usize {
        2 * c.layers * c.kv_width() * self.context * self.cache.bytes()
    }

    /// Bytes of the buffers of [`crate::State`] other than the cache.
    pub fn buffer_bytes(&self, c: &Config) -> usize {
        let per_token = 3 * c.width + 2 * c.q_width() + 2 * c.kv_width() + 2 * c.ffn + c.rope.dims;
        let floats = self.batch * per_token
            + self.logit_rows * c.vocab
            + self.threads * tile::floats(c.heads / c.kv_heads, c.head_dim)
            + c.heads * self.key_parts(c) * (c.head_dim + 2);
        let padded = self.longest_input(c).next_multiple_of(SUPER);
        let columns = self.activations.columns(self.batch);
        let second = match self.activations {
            Activations::Int8 => 0,
            _ => self.threads * (self.longest_input(c) + PARTIAL_COLUMNS * PARTIAL_ROWS),
        };
        // Codes, a scale and a scaled sum for each 32, and a sum for each 16.
        4 * (floats + second) + columns * (padded + padded / 4 + padded / 8)
    }

    /// Most parts of one head's keys that threads work on at a time, when one token attends:
    /// two tasks a thread, where there are fewer heads than that.
    pub fn key_parts(&self, c: &Config) -> usize {
        match self.threads {
            1 => 1,
            n => (2 * n).div_ceil(c.kv_heads),
        }
    }

    /// Values of the longest input of a matrix.
    pub fn longest_input(&self, c: &Config) -> usize {
        c.width.max(c.q_width()).max(c.ffn)
    }

    /// The longest context, up to `wanted`, whose cache takes at most half of `available`
    /// bytes; at least 256 tokens.
    pub fn fit_context(c: &Config, cache: CacheType, wanted: usize, available: u64) -> usize {
        let per_token = 2 * c.layers * c.kv_width() * cache.bytes();
        let fits = (available / 2) as usize / per_token / 256 * 256;
        wanted.min(fits.max(256))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Family, Pairing, Rope, Scaling};

    fn config() -> Config {
        let rope = Rope {
            theta: 1e4,
            dims: 128,
            pairing: Pairing::Half,
            scaling: Scaling::None,
        };
        let (layers, width, ffn, heads, kv_heads) = (32, 4096, 11008, 32, 8);
        Config {
            family: Family::Llama,
            name: String::new(),
            layers,
            width,
            ffn,
            heads,
            kv_heads,
            head_dim: 128,
            vocab: 32000,
            context: 131072,
            norm_eps: 1e-5,
            rope,
        }
    }

    #[test]
    fn cache_of_a_7b_model_at_8192_tokens_takes_1_07_gb() {
        let plan = Plan {
            context: 8192,
            cache: CacheType::F16,
            batch: 1,
            logit_rows: 1,
            threads: 1,
            activations: Activations::Int8,
        };
        assert_eq!(plan.kv_bytes(&config()), 1_073_741_824);
    }

    #[test]
    fn context_fits_the_memory_there_is() {
        // Case 14: 131,072 tokens would take 17 GB.
        assert_eq!(
            Plan::fit_context(&config(), CacheType::F16, 131_072, 4 << 30),
            16_384
        );
        assert_eq!(
            Plan::fit_context(&config(), CacheType::F16, 4096, 64 << 30),
            4096
        );
        assert_eq!(Plan::fit_context(&config(), CacheType::F16, 4096, 0), 256);
    }
}
