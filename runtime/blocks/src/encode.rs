//! The quantisers: from fp32 rows to blocks, shared by tools and tests.
