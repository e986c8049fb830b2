//! Panels hold what the plain rows hold.

use myq_blocks::conformance::{bench_matrix, formats};
use myq_blocks::panels::{self, PANEL};
use myq_blocks::{Layout, Rows};

#[test]
fn rows_come_back_from_panels_to_the_bit() {
    let mut seen = 0;
    for dtype in formats() {
        for cols in [32, 64, 96, 128, 160, 224, 256, 288, 576, 896, 1536] {
            if !panels::has_panels(dtype, cols) {
                continue;
            }
            let rows = bench_matrix(dtype, PANEL, cols).unwrap();
            let (mut panel, mut back) = (vec![0x5a; rows.len()], vec![0xa5; rows.len()]);
            panels::pack(dtype, cols, &rows, &mut panel);
            panels::unpack(dtype, cols, &panel, &mut back);
            assert!(back == rows, "{} of {cols}", dtype.name());
            assert!(cols == 32 || panel != rows, "{} of {cols}", dtype.name());
            let plain = Rows::new(dtype, cols, &rows).unwrap();
            let packed = Rows::in_layout(Layout::Rows8, dtype, cols, &panel).unwrap();
            for r in 0..PANEL {
                let (mut a, mut b) = (vec![0.0; cols], vec![1.0; cols]);
                plain.dequantize(r, &mut a);
                packed.dequantize(r, &mut b);
                assert_eq!(a, b, "{} of {cols}", dtype.name());
            }
            seen += 1;
        }
    }
    assert!(seen > 300, "{seen}");
}
