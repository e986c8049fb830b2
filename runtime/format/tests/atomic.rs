//! Files that appear whole or not at all, and what killed writers leave.

use std::io::Write;

use myq_format::atomic::AtomicFile;

#[test]
fn leftovers_of_dead_processes_go_and_those_of_living_ones_stay() {
    let folder = tempfile::tempdir().expect("a folder");
    let dir = folder.path();
    // No process has a number this large; process 1 always lives.
    let (dead, alive) = (dir.join(".m.myq.tmp-999999999"), dir.join(".m.myq.tmp-1"));
    for path in [&dead, &alive] {
        std::fs::write(path, b"half").expect("it writes");
    }
    let mut file = AtomicFile::create(&dir.join("m.myq")).expect("it opens");
    file.write_all(b"whole").expect("it writes");
    file.commit().expect("it commits");
    assert!(!dead.exists() && alive.exists());
    assert_eq!(
        std::fs::read(dir.join("m.myq")).expect("it is there"),
        b"whole"
    );
}

#[test]
fn what_is_not_a_regular_file_is_not_replaced() {
    let folder = tempfile::tempdir().expect("a folder");
    let dir = folder.path();
    assert!(AtomicFile::create(dir).is_err());
    assert_eq!(std::fs::read_dir(dir).expect("a folder").count(), 0);
}
