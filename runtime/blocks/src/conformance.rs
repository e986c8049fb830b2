//! Shapes, seeds and tolerances; the suite that every kernel crate runs.
