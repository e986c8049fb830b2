//! The CPU backend: every stage of the forward pass, its rows split over the pool.

use myq_blocks::{Kernels, Layout};
use myq_model::weights::{Layer, Matrix, Store};
use myq_model::{Backend, Batch, Config, Plan, Slot, State, rope::RopeTable};

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
    /// 8-bit columns of each token's activations: 1, or 2 for about 15 bits.
    planes: usize,
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
            planes: plan.activations.planes(),
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

impl<K: Kernels> Backend for Cpu<'_, K> {
    fn begin(&mut self, batch: &Batch<'_>, embedding: &Matrix) {
        (self.tokens, self.position, self.wanted) =
            (batch.tokens.len(), batch.position, batch.logits);
        let table = embedding.view(self.store);
        let (width, dims) = (self.config.width, self.rope.dims());
        for (i, &token) in batch.tokens.iter().enumerate() {
            let out = &mut self.state.hidden[i * width..(i + 1) * width];
            table.dequantize(token as usize, out);
            self.rope.angles(
                batch.position + i,
                &mut self.state.angles[i * dims..(i + 1) * dims],
            );
        }
    }

    fn norm(&mut self, weight: &[f32]) {
        let (k, width, eps) = (self.kernels, self.config.width, self.config.norm_eps);
        let n = self.tokens * width;
        let rows = self.state.hidden[..n]
            .chunks(width)
            .zip(self.state.normed[..n].chunks_mut(width));
        rows.for_each(|(x, out)| k.rms_norm(x, weight, eps, out));
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
            planes: self.planes,
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
        let (hd, dims) = (c.head_dim, self.rope.dims());
        for i in 0..self.tokens {
            let query = &mut s.query[i * c.q_width()..(i + 1) * c.q_width()];
            let key = &mut s.key[i * c.kv_width()..(i + 1) * c.kv_width()];
            let value = &mut s.value[i * c.kv_width()..(i + 1) * c.kv_width()];
            add(query, &layer.q_bias);
            add(key, &layer.k_bias);
            add(value, &layer.v_bias);
            let angles = &s.angles[i * dims..(i + 1) * dims];
            query
                .chunks_mut(hd)
                .for_each(|head| self.rope.turn(head, angles));
            for (h, (key, value)) in key.chunks_mut(hd).zip(value.chunks(hd)).enumerate() {
                self.rope.turn(key, angles);
                s.cache.put(k, index, h, self.position + i, (key, value));
            }
        }
    }

    fn attend(&mut self, index: usize) {
        let (c, s, k) = (self.config, &mut self.state, self.kernels);
        let (hd, context) = (c.head_dim, s.cache.context());
        let scale = 1.0 / (hd as f32).sqrt();
        let group = c.heads / c.kv_heads;
        let (query, cache, position, tokens) = (&s.query, &s.cache, self.position, self.tokens);
        let out = Disjoint::new(&mut s.attention);
        let scores = Disjoint::new(&mut s.scores);
        // A task is one head of up to eight tokens: enough tasks to balance, and the head's
        // keys and values stay in the cache for all of them.
        const TOKENS: usize = 8;
        let parts = tokens.div_ceil(TOKENS);
        self.pool.run(c.heads * parts, &|task, thread| {
            let (head, part) = (task / parts, task % parts);
            // SAFETY: each thread has a part of the scores of its own.
            let scores = unsafe { scores.part(thread * context, context) };
            for i in part * TOKENS..tokens.min((part + 1) * TOKENS) {
                let len = position + i + 1;
                let at = i * c.q_width() + head * hd;
                let past = cache.head(index, head / group);
                past.scores(k, &query[at..at + hd], scale, &mut scores[..len]);
                k.softmax(&mut scores[..len]);
                // SAFETY: head and token belong to this task alone.
                past.mix(k, &scores[..len], unsafe { out.part(at, hd) });
            }
        });
    }

    fn activate(&mut self) {
        let (k, n) = (self.kernels, self.tokens * self.config.ffn);
        let up = &self.state.up[..n];
        if self.tokens == 1 {
            return k.swiglu(&mut self.state.gate[..n], up);
        }
        let (ffn, gate) = (self.config.ffn, Disjoint::new(&mut self.state.gate[..n]));
        self.pool.run(self.tokens, &|i, _| {
            // SAFETY: a task has one token's values.
            k.swiglu(
                unsafe { gate.part(i * ffn, ffn) },
                &up[i * ffn..(i + 1) * ffn],
            );
        });
    }

    fn add(&mut self) {
        let n = self.tokens * self.config.width;
        add(&mut self.state.hidden[..n], &self.state.delta[..n]);
    }

    fn logits(&mut self, norm: &[f32], output: &Matrix) {
        let (k, width, eps) = (self.kernels, self.config.width, self.config.norm_eps);
        let (s, first) = (&mut self.state, self.tokens - self.wanted);
        for i in 0..self.wanted {
            let x = &s.hidden[(first + i) * width..(first + i + 1) * width];
            k.rms_norm(x, norm, eps, &mut s.normed[i * width..(i + 1) * width]);
        }
        let mut input = Input {
            x: &s.normed[..self.wanted * width],
            cols: width,
            planes: self.planes,
            codes: &mut s.codes,
            residual: &mut s.residual,
            partial: &mut s.partial,
        };
        let job = [Job::new(output, &mut s.logits[..self.wanted * output.rows])];
        input.multiply(k, self.store, &mut self.pool, &job);
    }
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
