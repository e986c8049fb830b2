//! Files cut at every byte and damaged at random: an error or a valid load, never a panic.

mod common;

use common::{Rng, mutate, reseal, small_gguf, small_myq, walk};

const ROUNDS: usize = 10_000;

#[test]
fn gguf_cut_at_every_byte_is_refused() {
    for version in [2, 3] {
        let file = small_gguf(version);
        assert_eq!(walk::gguf(&file).unwrap(), 5);
        // The last tensor ends 24 bytes before the file does: 168 bytes, padded to 192.
        let end = file.len() - 24;
        for cut in 0..end {
            assert!(
                walk::gguf(&file[..cut]).is_err(),
                "cut at {cut} of {}",
                file.len()
            );
        }
        walk::gguf(&file[..end]).unwrap();
    }
}

#[test]
fn myq_cut_at_every_byte_is_refused() {
    let file = small_myq();
    assert_eq!(walk::myq(&file).unwrap(), 4);
    for cut in 0..file.len() {
        assert!(
            walk::myq(&file[..cut]).is_err(),
            "cut at {cut} of {}",
            file.len()
        );
        // Even where the file's length and the checksum are made to fit the cut.
        let mut sealed = file[..cut].to_vec();
        reseal(&mut sealed);
        assert!(
            walk::myq(&sealed).is_err(),
            "cut and sealed at {cut} of {}",
            file.len()
        );
    }
}

#[test]
fn myq_with_any_bit_flipped_is_refused() {
    let file = small_myq();
    for at in 0..file.len() {
        let mut flipped = file.clone();
        flipped[at] ^= 1 << (at % 8);
        assert!(walk::myq(&flipped).is_err(), "flip at {at}");
    }
}

#[test]
fn gguf_damaged_at_random_never_panics() {
    let files = [small_gguf(2), small_gguf(3)];
    let mut rng = Rng(1);
    let mut loaded = 0;
    for round in 0..ROUNDS {
        loaded += usize::from(walk::gguf(&mutate(&mut rng, &files[round % 2])).is_ok());
    }
    // Both outcomes must occur, or the damage is of the wrong kind.
    assert!(
        (100..ROUNDS - 100).contains(&loaded),
        "{loaded} of {ROUNDS} loaded"
    );
}

#[test]
fn myq_damaged_at_random_never_panics() {
    let file = small_myq();
    let mut rng = Rng(2);
    for _ in 0..ROUNDS {
        let damaged = mutate(&mut rng, &file);
        assert!(damaged == file || walk::myq(&damaged).is_err());
    }
}

#[test]
fn myq_damaged_behind_the_checksum_never_panics() {
    let file = small_myq();
    // Only preamble and header: data have their own checksums.
    let front = 64 + u64::from_le_bytes(file[16..24].try_into().unwrap()) as usize;
    let mut rng = Rng(3);
    let mut loaded = 0;
    for _ in 0..ROUNDS {
        let mut damaged = mutate(&mut rng, &file[..front]);
        damaged.resize(front, b' ');
        damaged.extend(&file[front..]);
        reseal(&mut damaged);
        loaded += usize::from(walk::myq(&damaged).is_ok());
    }
    assert!(
        (100..ROUNDS - 100).contains(&loaded),
        "{loaded} of {ROUNDS} loaded"
    );
}
