//! Tile registers (AMX): permission and shapes.
//!
//! Source: Intel, Architecture Instruction Set Extensions, chapter on AMX.

/// Asks the system for the tile registers; `false` where processor or system lack them.
#[cfg(target_os = "linux")]
pub(crate) fn available() -> bool {
    const TILE_INT8_AND_BF16: u32 = 1 << 24 | 1 << 25 | 1 << 22;
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_long = 18;
    let has =
        core::arch::x86_64::__cpuid_count(7, 0).edx & TILE_INT8_AND_BF16 == TILE_INT8_AND_BF16;
    // SAFETY: the call takes two numbers; it allows this process to use the tile registers.
    has && unsafe {
        libc::syscall(
            libc::SYS_arch_prctl,
            ARCH_REQ_XCOMP_PERM,
            XFEATURE_XTILEDATA,
        ) == 0
    }
}

/// Without a system that we know how to ask, there are no tiles.
#[cfg(not(target_os = "linux"))]
pub(crate) fn available() -> bool {
    false
}

/// Shapes of the eight tiles, as `ldtilecfg` takes them.
#[repr(C, align(64))]
pub(crate) struct Configuration {
    palette: u8,
    start: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

impl Configuration {
    /// Rows of each tile, at most 16, and bytes of its rows, at most 64.
    pub(crate) const fn new(rows: [u8; 8], row_bytes: [u16; 8]) -> Configuration {
        let mut c = Configuration {
            palette: 1,
            start: 0,
            reserved: [0; 14],
            row_bytes: [0; 16],
            rows: [0; 16],
        };
        let mut i = 0;
        while i < 8 {
            (c.rows[i], c.row_bytes[i]) = (rows[i], row_bytes[i]);
            i += 1;
        }
        c
    }
}
