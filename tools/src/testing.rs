//! Numbers for tests.

/// `n` numbers around zero, nearly normal, as weights are.
pub(crate) fn numbers(n: usize, seed: u64) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / 8_388_608.0 - 1.0
    };
    (0..n)
        .map(|_| (0..4).map(|_| next()).sum::<f32>() * 0.5)
        .collect()
}
