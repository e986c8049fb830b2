//! The CPU backend: every stage of the forward pass, its rows split over the pool.

use myq_blocks::{Column, Kernels, MAX_COLUMNS};
use myq_model::weights::{Layer, Matrix};
use myq_model::{Backend, Batch, Config, Plan, Slot, State, rope::RopeTable};

use crate::pool::Pool;

/// Rows of a matrix that one task multiplies at least: smaller pieces cost more in hand-out
/// than they gain in balance.
const MIN_ROWS: usize = 16;
/// Bytes of weights in a task that is worth handing out.
const TASK_BYTES: usize = 32 << 10;

/// Buffers, threads and kernels of one sequence.
pub(crate) struct Cpu<'m, K> {
    kernels: K,
    file: &'m [u8],
    config: &'m Config,
    rope: &'m RopeTable,
    pool: Pool,
    state: State,
    /// Tokens, first position and wanted logits of the batch in work.
    tokens: usize,
    position: usize,
    wanted: usize,
}

impl<'m, K: Kernels> Cpu<'m, K> {
    pub(crate) fn new(
        kernels: K,
        file: &'m [u8],
        config: &'m Config,
        rope: &'m RopeTable,
        plan: &Plan,
    ) -> std::io::Result<Self> {
        Ok(Cpu {
            kernels,
            file,
            config,
            rope,
            pool: Pool::new(plan.threads)?,
            state: State::new(config, plan),
            tokens: 0,
            position: 0,
            wanted: 0,
        })
    }

    pub(crate) fn logits(&self) -> &[f32] {
        &self.state.logits[..self.wanted * self.config.vocab]
    }

    pub(crate) fn kernel_name(&self) -> &'static str {
        self.kernels.name()
    }
}

impl<K: Kernels> Backend for Cpu<'_, K> {
    fn begin(&mut self, batch: &Batch<'_>, embedding: &Matrix) {
        (self.tokens, self.position, self.wanted) =
            (batch.tokens.len(), batch.position, batch.logits);
        let table = embedding.view(self.file);
        let (width, dims) = (self.config.width, self.rope.dims());
        for (i, &token) in batch.tokens.iter().enumerate() {
            let out = &mut self.state.hidden[i * width..(i + 1) * width];
            myq_blocks::decode::dequantize_row(table.dtype(), table.row(token as usize), out);
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
        let x = &x[..self.tokens * outputs[0].0.cols];
        let codes = Codes::of(&mut s.codes, x, outputs[0].0.cols);
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
        multiply(
            self.kernels,
            self.file,
            &mut self.pool,
            codes,
            &mut jobs[..outputs.len()],
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
        let codes = Codes::of(&mut s.codes, &s.normed[..self.wanted * width], width);
        let mut job = [Job::new(output, &mut s.logits[..self.wanted * output.rows])];
        multiply(k, self.file, &mut self.pool, codes, &mut job);
    }
}

fn add(x: &mut [f32], y: &[f32]) {
    x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
}

/// The input of a matrix: fp32 columns and room for their 8-bit form.
struct Codes<'a> {
    buffer: &'a mut myq_blocks::ActBuffer,
    x: &'a [f32],
    cols: usize,
}

impl<'a> Codes<'a> {
    fn of(buffer: &'a mut myq_blocks::ActBuffer, x: &'a [f32], cols: usize) -> Self {
        Codes { buffer, x, cols }
    }
}

/// A matrix and where its product goes: tokens × rows.
struct Job<'a> {
    matrix: Option<Matrix>,
    out: Disjoint<'a>,
}

impl<'a> Job<'a> {
    const NONE: Job<'static> = Job {
        matrix: None,
        out: Disjoint {
            start: std::ptr::null_mut(),
            len: 0,
            life: std::marker::PhantomData,
        },
    };

    fn new(matrix: &Matrix, out: &'a mut [f32]) -> Job<'a> {
        Job {
            matrix: Some(*matrix),
            out: Disjoint::new(out),
        }
    }
}

/// Quantises the columns, then splits the rows of all matrices over the pool.
fn multiply<K: Kernels>(
    k: K,
    file: &[u8],
    pool: &mut Pool,
    input: Codes<'_>,
    jobs: &mut [Job<'_>],
) {
    let Codes { buffer, x, cols } = input;
    let columns = x.len() / cols;
    let matrices = || jobs.iter().filter_map(|j| j.matrix.map(|m| (m, &j.out)));
    if matrices().any(|(m, _)| k.wants_codes(m.dtype)) {
        for (x, out) in x.chunks(cols).zip(buffer.columns_mut(cols)) {
            k.quantize(x, out);
        }
    }
    let buffer = &*buffer;
    // Rows per task: at least TASK_BYTES of weights, and a few tasks for each thread.
    let mut tasks = [(0usize, 0usize); 3];
    let mut total = 0;
    for ((m, _), t) in matrices().zip(&mut tasks) {
        let row_bytes = m.bytes() / m.rows;
        let fair = m.rows.div_ceil(pool.threads() * 4);
        let rows = TASK_BYTES
            .div_ceil(row_bytes)
            .max(MIN_ROWS)
            .min(fair.max(MIN_ROWS));
        *t = (rows, total);
        total += m.rows.div_ceil(rows);
    }
    let body = |task: usize, _: usize| {
        for ((m, out), &(rows, first)) in matrices().zip(&tasks) {
            let n = m.rows.div_ceil(rows);
            if (first..first + n).contains(&task) {
                let start = (task - first) * rows;
                let part = start..m.rows.min(start + rows);
                return one_task(
                    k,
                    m.view(file).slice(part.clone()),
                    part.start,
                    m.rows,
                    out,
                    |i| buffer.column(i, &x[i * cols..(i + 1) * cols]),
                    columns,
                );
            }
        }
    };
    pool.run(total, &body);
}

/// Some rows times all columns, [`MAX_COLUMNS`] at a time.
fn one_task<'a, K: Kernels>(
    k: K,
    rows: myq_blocks::Rows<'_>,
    first: usize,
    stride: usize,
    out: &Disjoint<'_>,
    column: impl Fn(usize) -> Column<'a>,
    columns: usize,
) {
    for c in (0..columns).step_by(MAX_COLUMNS) {
        let n = MAX_COLUMNS.min(columns - c);
        let inputs: [Column<'_>; MAX_COLUMNS] = std::array::from_fn(|i| column(c + i.min(n - 1)));
        let mut outputs: [&mut [f32]; MAX_COLUMNS] = std::array::from_fn(|i| {
            if i < n {
                // SAFETY: these rows belong to this task alone, and each column to one slice.
                unsafe { out.part((c + i) * stride + first, rows.rows()) }
            } else {
                &mut []
            }
        });
        k.matmul(rows, &inputs[..n], &mut outputs[..n]);
    }
}

/// A buffer that several threads write, each its own part.
struct Disjoint<'a> {
    start: *mut f32,
    len: usize,
    life: std::marker::PhantomData<&'a mut [f32]>,
}

// SAFETY: the buffer is only reached through `part`, whose callers promise that parts in use
// at one time do not overlap.
unsafe impl Sync for Disjoint<'_> {}

impl<'a> Disjoint<'a> {
    fn new(buffer: &'a mut [f32]) -> Self {
        Disjoint {
            start: buffer.as_mut_ptr(),
            len: buffer.len(),
            life: std::marker::PhantomData,
        }
    }

    /// # Safety
    /// No other part in use overlaps `at .. at + len`.
    #[expect(clippy::mut_from_ref, reason = "disjointness is the caller's promise")]
    unsafe fn part(&self, at: usize, len: usize) -> &mut [f32] {
        assert!(at + len <= self.len);
        // SAFETY: in bounds by the assertion; not aliased by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(at), len) }
    }
}
