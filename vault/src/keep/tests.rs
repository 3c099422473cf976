//! What is kept comes back as it was or not at all: with a folder as the store.

use std::fs;
use std::path::Path;

use super::*;

struct Room {
    dir: tempfile::TempDir,
    vault: Vault,
}

impl Room {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let location = Location { folder: dir.path().join("store"), ..Location::default() };
        let vault = Vault::open(&location, "here").unwrap();
        Self { dir, vault }
    }

    fn files(&self, folder: &str) -> Vec<File> {
        let folder = self.dir.path().join(folder);
        fs::create_dir_all(&folder).unwrap();
        let file = |name| File { name, path: folder.join(name) };
        vec![file("memory"), file("state")]
    }

    /// A large file that is mostly holes, and a small one that packs to nothing less.
    fn write(&self) -> Vec<File> {
        let files = self.files("given");
        fs::write(&files[0].path, vec![7; 3 << 20]).unwrap();
        fs::File::options().write(true).open(&files[0].path).unwrap().set_len(1 << 30).unwrap();
        let noise: Vec<u8> =
            (0..9_u32 << 20).map(|n| n.wrapping_mul(0x9e37_79b1).to_le_bytes()[2]).collect();
        fs::write(&files[1].path, noise).unwrap();
        files
    }

    fn object(&self, key: &str, name: &str) -> PathBuf {
        self.dir.path().join("store/here").join(key).join(name)
    }
}

fn same(a: &Path, b: &Path) -> bool {
    let cut = |path: &Path| {
        let mut bytes = Vec::new();
        std::io::Read::read_to_end(
            &mut std::io::Read::take(fs::File::open(path).unwrap(), 12 << 20),
            &mut bytes,
        )
        .unwrap();
        (fs::metadata(path).unwrap().len(), bytes)
    };
    cut(a) == cut(b)
}

/// Promise 69.
#[tokio::test]
async fn what_is_kept_comes_back_as_it_was_and_costs_what_is_no_hole() {
    let room = Room::new();
    let given = room.write();
    let stored =
        room.vault.put("1-demo", serde_json::json!({"name": "demo"}), &given).await.unwrap();
    assert!(stored.bytes < 12 << 20, "{stored:?}");
    let back = room.files("back");
    room.vault.get(&stored, &back).await.unwrap();
    assert!(given.iter().zip(&back).all(|(was, is)| same(&was.path, &is.path)));
    let again = room.vault.get(&stored, &back).await;
    assert!(matches!(again, Err(Error::File { .. })), "never over what is there");
    assert_eq!(room.vault.keys().await.unwrap(), BTreeSet::from(["1-demo".to_owned()]));
    room.vault.forget("1-demo").await.unwrap();
    room.vault.forget("1-demo").await.unwrap();
    assert!(room.vault.keys().await.unwrap().is_empty());
    let gone = room.vault.get(&stored, &room.files("third")).await;
    assert!(gone.is_err_and(|error| error.is_missing()));
}

/// Promise 69.
#[tokio::test]
async fn whatever_is_damaged_in_the_store_is_found_and_named() {
    let room = Room::new();
    let stored = room.vault.put("1-demo", serde_json::Value::Null, &room.write()).await.unwrap();
    let mut number = 0;
    let mut get = async || {
        number += 1;
        room.vault.get(&stored, &room.files(&format!("back{number}"))).await
    };
    for name in ["memory", "state", LIST] {
        let at = room.object("1-demo", name);
        let whole = fs::read(&at).unwrap();
        for place in [0, 20, whole.len() / 2, whole.len() - 1] {
            let mut bytes = whole.clone();
            bytes[place] ^= 1;
            fs::write(&at, bytes).unwrap();
            let error = get().await.unwrap_err();
            let Error::Damaged { object, .. } = &error else { panic!("{name} {place}: {error}") };
            assert!(object.ends_with(name), "{error}");
        }
        for bytes in [&whole[..whole.len() - 1], &[]] {
            fs::write(&at, bytes).unwrap();
            let error = get().await.unwrap_err();
            assert!(!error.is_missing(), "{name}: {error}");
        }
        fs::remove_file(&at).unwrap();
        assert!(get().await.unwrap_err().is_missing(), "{name}");
        fs::write(&at, whole).unwrap();
    }
    get().await.expect("control: it is whole again");
}

/// Promise 69.
#[tokio::test]
async fn what_is_given_up_half_way_is_no_key_that_can_be_got() {
    let room = Room::new();
    let mut files = room.write();
    files.push(File { name: "disk", path: room.dir.path().join("none") });
    let failed = room.vault.put("1-demo", serde_json::Value::Null, &files).await;
    assert!(matches!(failed, Err(Error::File { .. })), "{failed:?}");
    assert!(!room.object("1-demo", LIST).exists());
    assert!(room.object("1-demo", "memory").exists(), "control: it was begun");
    room.vault.forget("1-demo").await.unwrap();
    assert!(room.vault.keys().await.unwrap().is_empty());
}

#[tokio::test]
async fn what_is_in_another_store_says_where() {
    let room = Room::new();
    let stored = room.vault.put("1-demo", serde_json::Value::Null, &room.write()).await.unwrap();
    let other = Stored { url: "s3://other".to_owned(), ..stored };
    let error = room.vault.get(&other, &room.files("back")).await.unwrap_err().to_string();
    assert!(error.contains("s3://other") && error.contains("store.url"), "{error}");
}

/// Promise 77. Holes and zeros need nothing, whatever the file's length; a list of an earlier version says the length.
#[tokio::test]
async fn what_is_kept_says_how_much_it_needs_to_come_back() {
    let room = Room::new();
    let given = room.write();
    let stored = room.vault.put("1-a", serde_json::json!({}), &given).await.unwrap();
    let needs = room.vault.needs(&stored, &room.files("got")).await.unwrap();
    assert!((3 << 20..(3 << 20) + 4096).contains(&needs[0]), "{needs:?}");
    assert!((9 << 20..(9 << 20) + 8192).contains(&needs[1]), "{needs:?}");
    let before = r#"{ "length": 77, "bytes": 5, "sha256": "" }"#;
    assert_eq!(serde_json::from_str::<Carried>(before).unwrap().needs(), 77);
    let none = vec![File { name: "other", path: room.dir.path().join("other") }];
    assert!(room.vault.needs(&stored, &none).await.unwrap_err().is_missing());
}

/// Promise 72.
#[tokio::test]
async fn what_could_not_be_got_back_is_told_before_it_is_needed() {
    let room = Room::new();
    let given = room.write();
    let stored = room.vault.put("1-demo", serde_json::Value::Null, &given).await.unwrap();
    room.vault.check(&stored, &given).await.expect("control: it could");
    for name in ["memory", "state", LIST] {
        let at = room.object("1-demo", name);
        let whole = fs::read(&at).unwrap();
        let mut bytes = whole.clone();
        *bytes.last_mut().unwrap() ^= 1;
        fs::write(&at, bytes).unwrap();
        let found = room.vault.check(&stored, &given).await;
        assert!(matches!(found, Err(Error::Damaged { .. })), "{name}: {found:?}");
        fs::remove_file(&at).unwrap();
        let found = room.vault.check(&stored, &given).await;
        assert!(found.is_err_and(|error| error.is_missing()), "{name}");
        fs::write(&at, whole).unwrap();
    }
}
