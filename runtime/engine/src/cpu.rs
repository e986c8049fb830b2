//! The CPU backend: every stage of the forward pass, its rows split over the pool.

use myq_blocks::{Kernels, Layout};
use myq_model::cache::tile::{self, Tile};
use myq_model::weights::{Layer, Matrix, Store};
use myq_model::{Activations, Backend, Batch, Config, Plan, Slot, State, rope::RopeTable};

use crate::matmul::{Input, Job};
use crate::pool::Pool;

/// Buffers, threads and kernels of one sequence.
pub(crate) struct Cpu<'m, K> {
    kernels: K,
    store: Store<'m>,
    config: &'m Config,
    rope: &'m RopeTable,
    pool: Pool,
    state: State,
    /// How inputs of matrices are rounded.
    activations: Activations,
    /// Tokens, first position and wanted logits of the batch in work.
    tokens: usize,
    position: usize,
    wanted: usize,
}

impl<'m, K: Kernels> Cpu<'m, K> {
    pub(crate) fn new(
        kernels: K,
        store: Store<'m>,
        config: &'m Config,
        rope: &'m RopeTable,
        plan: &Plan,
        pool: Pool,
    ) -> Self {
        Cpu {
            kernels,
            store,
            config,
            rope,
            pool,
            state: State::new(config, plan),
            activations: plan.activations,
            tokens: 0,
            position: 0,
            wanted: 0,
        }
    }

    pub(crate) fn logits(&self) -> &[f32] {
        &self.state.logits[..self.wanted * self.config.vocab]
    }

    /// The layout that the kernels want.
    pub(crate) fn layout(&self) -> Layout {
        self.kernels.layout()
    }

    /// Copies of matrices that the weights of the next pass refer to.
    pub(crate) fn set_packed(&mut self, packed: &'m [u8]) {
        self.store.packed = packed;
    }

    pub(crate) fn kernel_name(&self) -> &'static str {
        self.kernels.name()
    }
}

impl<K: Kernels> Cpu<'_, K> {
    /// Attention of one token, the keys of each head split into parts for the threads.
    fn attend_in_parts(&mut self, index: usize, parts: usize) {
        let (c, s, k) = (self.config, &mut self.state, self.kernels);
        let (group, hd) = (c.heads / c.kv_heads, c.head_dim);
        let (query, cache, position) = (&s.query, &s.cache, self.position);
        let (size, stride) = (tile::floats(group, hd), group * (hd + 2));
        let scratch = Disjoint::new(&mut s.tiles);
        let seen = Disjoint::new(&mut s.parts);
        let keys = (position + 1).div_ceil(parts);
        self.pool.run(c.kv_heads * parts, &|task, thread| {
            let (head, part) = (task / parts, task % parts);
            // SAFETY: each thread has scratch of its own, and each task its part.
            let (scratch, seen) = unsafe {
                (
                    scratch.part(thread * size, size),
                    seen.part(task * stride, stride),
                )
            };
            let mut tile = Tile::new(scratch, group, hd, 1);
            let query = &query[head * group * hd..(head + 1) * group * hd];
            tile.set_queries(0, query, score_scale(hd));
            let range = part * keys..(position + 1).min((part + 1) * keys);
            tile.attend(k, cache.head(index, head), range, position);
            tile.part(seen);
        });
        let heads = s.attention[..c.q_width()].chunks_exact_mut(hd);
        for (i, out) in heads.enumerate() {
            let (head, row) = (i / group, i % group);
            let first = head * parts * stride + row * (hd + 2);
            tile::merge(&s.parts[first..(head + 1) * parts * stride], stride, out);
        }
    }
}

impl<K: Kernels> Backend for Cpu<'_, K> {
    fn begin(&mut self, batch: &Batch<'_>, embedding: &Matrix) {
        (self.tokens, self.position, self.wanted) =
            (batch.tokens.len(), batch.position, batch.logits);
        let table = embedding.view(self.store);
        let (width, rope, dims) = (self.config.width, self.rope, self.rope.dims());
        let hidden = Disjoint::new(&mut self.state.hidden);
        let angles = Disjoint::new(&mut self.state.angles);
        by_token(&mut self.pool, self.tokens, width, &|i| {
            // SAFETY: these values are this token's alone.
            let (hidden, angles) =
                unsafe { (hidden.part(i * width, width), angles.part(i * dims, dims)) };
            table.dequantize(batch.tokens[i] as usize, hidden);
            rope.angles(batch.position + i, angles);
        });
    }

    fn norm(&mut self, weight: &[f32]) {
        let (k, width, eps) = (self.kernels, self.config.width, self.config.norm_eps);
        let hidden = &self.state.hidden;
        let normed = Disjoint::new(&mut self.state.normed);
        by_token(&mut self.pool, self.tokens, width, &|i| {
            // SAFETY: these values are this token's alone.
            let out = unsafe { normed.part(i * width, width) };
            k.rms_norm(&hidden[i * width..(i + 1) * width], weight, eps, out);
        });
    }

    fn project(&mut self, input: Slot, outputs: &[(Matrix, Slot)]) {
        let s = &mut self.state;
        let (x, mut gate): (&[f32], _) = match input {
            Slot::Gate => (&s.gate, None),
            Slot::Attention => (&s.attention, Some(&mut s.gate)),
            _ => (&s.normed, Some(&mut s.gate)),
        };
        let mut input = Input {
            x: &x[..self.tokens * outputs[0].0.cols],
            cols: outputs[0].0.cols,
            planes: self.activations.planes(self.tokens),
            codes: &mut s.codes,
            residual: &mut s.residual,
            partial: &mut s.partial,
        };
        // Matrix and destination of each output; at most three.
        let mut jobs = [Job::NONE; 3];
        let (mut q, mut k, mut v) = (Some(&mut s.query), Some(&mut s.key), Some(&mut s.value));
        let (mut up, mut delta) = (Some(&mut s.up), Some(&mut s.delta));
        for (job, (matrix, slot)) in jobs.iter_mut().zip(outputs) {
            let out = match slot {
                Slot::Query => q.take(),
                Slot::Key => k.take(),
                Slot::Value => v.take(),
                Slot::Gate => gate.take(),
                Slot::Up => up.take(),
                _ => delta.take(),
            };
            let out = out.expect("each output of a stage has its own slot, apart from the input");
            *job = Job::new(matrix, &mut out[..self.tokens * matrix.rows]);
        }
        input.multiply(
            self.kernels,
            self.store,
            &mut self.pool,
            &jobs[..outputs.len()],
        );
    }

    fn rope_and_store(&mut self, index: usize, layer: &Layer) {
        let (c, s, k) = (self.config, &mut self.state, self.kernels);
        let (hd, dims, rope) = (c.head_dim, self.rope.dims(), self.rope);
        let (q_width, kv_width) = (c.q_width(), c.kv_width());
        let angles = &s.angles;
        let query = Disjoint::new(&mut s.query);
        let (key, value) = (Disjoint::new(&mut s.key), Disjoint::new(&mut s.value));
        by_token(&mut self.pool, self.tokens, q_width, &|i| {
            // SAFETY: these values are this token's alone.
            let (query, key, value) = unsafe {
                (
                    query.part(i * q_width, q_width),
                    key.part(i * kv_width, kv_width),
                    value.part(i * kv_width, kv_width),
                )
            };
            add(query, &layer.q_bias);
            add(key, &layer.k_bias);
            add(value, &layer.v_bias);
            let angles = &angles[i * dims..(i + 1) * dims];
            let heads = query.chunks_exact_mut(hd).chain(key.chunks_exact_mut(hd));
            heads.for_each(|head| rope.turn(head, angles));
        });
        // A copy in half the size, cheaper than the threads' hand-over.
        let rows = s
            .key
            .chunks_exact(kv_width)
            .zip(s.value.chunks_exact(kv_width));
        for (i, (key, value)) in rows.take(self.tokens).enumerate() {
            let heads = key.chunks_exact(hd).zip(value.chunks_exact(hd));
            for (h, pair) in heads.enumerate() {
                s.cache.put(k, index, h, self.position + i, pair);
            }
        }
    }

    fn attend(&mut self, index: usize) {
        let c = self.config;
        // Keys of a part that is worth handing out.
        const KEYS: usize = 128;
        let most = self.state.parts.len() / (c.heads * (c.head_dim + 2));
        let parts = most.min((self.position + 1).div_ceil(KEYS));
        if self.tokens == 1 && parts > 1 {
            return self.attend_in_parts(index, parts);
        }
        let (s, k) = (&mut self.state, self.kernels);
        let (group, hd, width) = (c.heads / c.kv_heads, c.head_dim, c.q_width());
        let (query, cache, position, tokens) = (&s.query, &s.cache, self.position, self.tokens);
        let out = Disjoint::new(&mut s.attention);
        let size = tile::floats(group, hd);
        let scratch = Disjoint::new(&mut s.tiles);
        // Tokens of a task: a whole tile, or less where threads would have none.
        let fair = (tokens * c.kv_heads).div_ceil(2 * self.pool.threads());
        let some = tile::tokens(group).min(fair).max(1);
        let tiles = tokens.div_ceil(some);
        self.pool.run(c.kv_heads * tiles, &|task, thread| {
            // The last tokens first: they see the most keys and take the longest.
            let (head, first) = (task % c.kv_heads, (tiles - 1 - task / c.kv_heads) * some);
            let count = some.min(tokens - first);
            // SAFETY: each thread has scratch of its own.
            let scratch = unsafe { scratch.part(thread * size, size) };
            let mut tile = Tile::new(scratch, group, hd, count);
            let place = |i: usize| (first + i) * width + head * group * hd;
            for i in 0..count {
                tile.set_queries(i, &query[place(i)..][..group * hd], score_scale(hd));
            }
            let seen = position + first;
            tile.attend(k, cache.head(index, head), 0..seen + count, seen);
            for i in 0..count {
                // SAFETY: these heads of this token are this task's alone.
                tile.attention(i, unsafe { out.part(place(i), group * hd) });
            }
        });
    }

    fn activate(&mut self) {
        let (k, ffn) = (self.kernels, self.config.ffn);
        let up = &self.state.up;
        let gate = Disjoint::new(&mut self.state.gate);
        by_token(&mut self.pool, self.tokens, ffn, &|i| {
            // SAFETY: these values are this token's alone.
            let gate = unsafe { gate.part(i * ffn, ffn) };
            k.swiglu(gate, &up[i * ffn..(i + 1) * ffn]);
        });
    }

    fn add(&mut self) {
        let width = self.config.width;
        let delta = &self.state.delta;
        let hidden = Disjoint::new(&mut self.state.hidden);
        by_token(&mut self.pool, self.tokens, width, &|i| {
            // SAFETY: these values are this token's alone.
            let hidden = unsafe { hidden.part(i * width, width) };
            add(hidden, &delta[i * width..(i + 1) * width]);
        });
    }

    fn logits(&mut self, norm: &[f32], output: &Matrix) {
        let (k, width, eps) = (self.kernels, self.config.width, self.config.norm_eps);
        let (s, first) = (&mut self.state, self.tokens - self.wanted);
        let (hidden, normed) = (&s.hidden, Disjoint::new(&mut s.normed));
        by_token(&mut self.pool, self.wanted, width, &|i| {
            let x = &hidden[(first + i) * width..(first + i + 1) * width];
            // SAFETY: these values are this token's alone.
            k.rms_norm(x, norm, eps, unsafe { normed.part(i * width, width) });
        });
        let mut input = Input {
            x: &s.normed[..self.wanted * width],
            cols: width,
            planes: self.activations.planes(self.wanted),
            codes: &mut s.codes,
            residual: &mut s.residual,
            partial: &mut s.partial,
        };
        let job = [Job::new(output, &mut s.logits[..self.wanted * output.rows])];
        input.multiply(k, self.store, &mut self.pool, &job);
    }
}

/// What scores of heads of `dim` values are multiplied by.
fn score_scale(dim: usize) -> f32 {
    1.0 / (dim as f32).sqrt()
}

/// Calls `body` for each of `tokens` tokens, `width` values each, on all threads if that is
/// worth it.
fn by_token(pool: &mut Pool, tokens: usize, width: usize, body: &(dyn Fn(usize) + Sync)) {
    // Work of some microseconds, as long as a hand-over takes.
    const SHARED: usize = 16 << 10;
    if tokens * width < SHARED {
        return (0..tokens).for_each(body);
    }
    // A few tasks for each thread.
    let some = tokens.div_ceil(4 * pool.threads());
    pool.run(tokens.div_ceil(some), &|task, _| {
        (task * some..tokens.min((task + 1) * some)).for_each(body);
    });
}

fn add(x: &mut [f32], y: &[f32]) {
    x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
}

/// A buffer that several threads write, each its own part.
pub(crate) struct Disjoint<'a> {
    start: *mut f32,
    len: usize,
    life: std::marker::PhantomData<&'a mut [f32]>,
}

// SAFETY: the buffer is only reached through `part`, whose callers promise that parts in use
// at one time do not overlap.
unsafe impl Sync for Disjoint<'_> {}

impl<'a> Disjoint<'a> {
    pub(crate) const EMPTY: Disjoint<'static> = Disjoint {
        start: std::ptr::null_mut(),
        len: 0,
        life: std::marker::PhantomData,
    };

    pub(crate) fn new(buffer: &'a mut [f32]) -> Self {
        Disjoint {
            start: buffer.as_mut_ptr(),
            len: buffer.len(),
            life: std::marker::PhantomData,
        }
    }

    /// # Safety
    /// No other part in use overlaps `at .. at + len`.
    #[expect(clippy::mut_from_ref, reason = "disjointness is the caller's promise")]
    pub(crate) unsafe fn part(&self, at: usize, len: usize) -> &mut [f32] {
        assert!(at + len <= self.len);
        // SAFETY: in bounds by the assertion; not aliased by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(at), len) }
    }
}
