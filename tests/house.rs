//! The shape of the house: which crate may know which, which module may know which, where `unsafe`
//! may stand, how long a file is, which versions are the least. Adding an arrow means editing this
//! file, in the open. It reads the sources as text and runs nothing.
#![expect(clippy::unwrap_used, reason = "tests: what cannot be read ends the test")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// A room, its folder, and the rooms it may name. Top-down: each row names only rows below it.
const HOUSE: &[(&str, &str, &[&str])] = &[
    ("postern", ".", &["lifecycle", "egress", "dns", "vmm", "vault", "agent", "policy", "fault"]),
    ("lifecycle", "lifecycle", &["egress", "dns", "vmm", "vault", "agent", "policy", "fault"]),
    ("egress", "egress", &["dns", "policy", "fault"]),
    ("dns", "dns", &["policy", "fault"]),
    ("vmm", "vmm", &["policy", "fault"]),
    ("vault", "vault", &["fault"]),
    ("agent", "agent", &[]),
    ("policy", "policy", &[]),
    ("fault", "fault", &[]),
];

/// The only modules that may hold `unsafe`; every other file is under `forbid`.
const UNSAFE: &[&str] = &["vmm/src/tap.rs", "vmm/src/kvm_probe.rs", "agent/src/guest/entropy.rs"];

/// Least versions, each for a published flaw that an older one has.
const FLOORS: &[(&str, &str)] = &[
    ("rustls", "0.23.18"),
    ("rustls-webpki", "0.103.13"),
    ("aws-lc-sys", "0.39.0"),
    ("hyper", "1.11.0"),
    ("h2", "0.4.17"),
    ("hickory-proto", "0.26.1"),
    ("hickory-resolver", "0.26.1"),
    ("quinn-proto", "0.11.15"),
    ("idna", "1.0.3"),
    ("tokio", "1.44.2"),
    ("rand", "0.9.3"),
    ("ring", "0.17.12"),
];

/// Crates that must not be in the lock file at all.
const BANNED: &[&str] = &["openssl", "openssl-sys", "native-tls", "nftnl", "async-std"];

#[test]
fn crates_know_only_the_crates_below_them() {
    for (row, (name, dir, allowed)) in HOUSE.iter().enumerate() {
        let manifest = manifest(dir);
        let dependencies = manifest["dependencies"].as_table().unwrap();
        let found: BTreeSet<&str> = HOUSE
            .iter()
            .map(|(other, ..)| *other)
            .filter(|other| dependencies.contains_key(*other))
            .collect();
        let allowed: BTreeSet<&str> = allowed.iter().copied().collect();
        assert!(found.is_subset(&allowed), "{name} names {found:?}, it may name {allowed:?}");
        for arrow in allowed {
            let below = HOUSE.iter().position(|(other, ..)| *other == arrow).unwrap();
            assert!(below > row, "{name} -> {arrow} points up");
        }
    }
}

#[test]
fn modules_know_only_the_modules_below_them() {
    let mut wrong = Vec::new();
    for (name, dir, _) in HOUSE {
        let src = root().join(dir).join("src");
        let lib = fs::read_to_string(src.join("lib.rs")).unwrap();
        let order: Vec<&str> = lib
            .lines()
            .filter_map(|line| {
                line.trim_start_matches("pub ").strip_prefix("mod ")?.strip_suffix(';')
            })
            .collect();
        // A type that lib.rs re-exports stands for its module.
        let mut homes: BTreeMap<&str, &str> = BTreeMap::new();
        for line in lib.lines() {
            let Some(path) = line.strip_prefix("pub use ") else { continue };
            let Some((module, names)) = path.trim_end_matches(';').split_once("::") else {
                continue;
            };
            for name in names.split(|c: char| !c.is_alphanumeric() && c != '_') {
                homes.insert(name, module);
            }
        }
        for (row, module) in order.iter().enumerate() {
            for (path, text) in sources(&src, module) {
                if text.contains("super::") && !is_test(&path) {
                    wrong.push(format!("{}: says `super::`; say `crate::`", path.display()));
                }
                if is_test(&path) {
                    continue;
                }
                for named in named_modules(&text) {
                    let named = homes.get(named).copied().unwrap_or(named);
                    if order.iter().position(|other| *other == named).is_some_and(|up| up < row) {
                        wrong.push(format!("{name}: {module} -> {named} points up"));
                    }
                }
            }
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

#[test]
fn the_policy_room_is_pure() {
    let manifest = manifest("policy");
    for impure in ["tokio", "tracing", "nix", "socket2", "rusqlite"] {
        assert!(!manifest["dependencies"].as_table().unwrap().contains_key(impure), "{impure}");
    }
    for (path, text) in rust_files("policy/src") {
        for call in ["SystemTime::now", "Instant::now", "std::fs::", "std::env::", "println!"] {
            assert!(!code(&text).contains(call), "{}: {call}", path.display());
        }
    }
}

/// Tests can end a daemon between two steps only where debug assertions are compiled in.
#[test]
fn a_release_cannot_be_struck_by_a_fault() {
    let profiles = manifest(".")["profile"].as_table().unwrap().clone();
    assert!(!profiles["release"].as_table().unwrap().contains_key("debug-assertions"));
    for (path, text) in rust_files("fault/src") {
        let guarded = text.matches("#[cfg(debug_assertions)]").count();
        let uses = code(&text).matches("debug::").count();
        assert_eq!(guarded, uses + 1, "{}: each use of `debug`, and itself", path.display());
    }
}

/// What is decided, limited or waited for goes by a clock that nobody sets.
#[test]
fn only_what_is_recorded_or_shown_reads_the_wall_clock() {
    let dated = ["Record::new(fault::wall_clock()", "record.time = fault::wall_clock()"];
    // Everybody else asks `fault`, whose clock a test can set.
    let system = [("fault/src/lib.rs", 2), ("src/doctor/checks.rs", 1)];
    let allowed = [
        ("src/api/events.rs", 1),              // `since 10m`
        ("src/api/usage.rs", 1),               // likewise
        ("lifecycle/src/keeper/birth.rs", 1),  // when it was created
        ("lifecycle/src/driver/copied.rs", 2), // when a snapshot was taken, and that its sandbox is woken now
        ("lifecycle/src/keeper/rest.rs", 1),   // how far away is the time to be woken at
        ("lifecycle/src/reconcile.rs", 1),     // how far it is yet, in another boot of the host
        ("lifecycle/src/store/counter.rs", 1), // numbers that say nothing else
        ("lifecycle/src/usage/tab.rs", 1),     // in which hour something was used
        ("lifecycle/src/acts/agent.rs", 1),    // the guest's clock is set
        ("src/auditlog/files.rs", 1),          // whether it was set back: another file begins
        ("vmm/src/qemu/command.rs", 1),        // the guest's clock at boot
    ];
    for (path, text) in all_rust_files() {
        let relative = relative(&path);
        if is_test(&path) || relative.starts_with("tests/") {
            continue;
        }
        let code = code(&text);
        for call in ["unixepoch", "CURRENT_TIMESTAMP"] {
            assert!(!code.contains(call), "{relative} reads the wall clock by {call}");
        }
        let most = |table: &[(&str, usize)]| {
            table.iter().find(|(file, _)| *file == relative).map_or(0, |(_, n)| *n)
        };
        let bare = code.matches("SystemTime::now()").count();
        assert!(bare <= most(&system), "{relative}: say `fault::wall_clock()`");
        let others = code.matches("fault::wall_clock()").count()
            - dated.iter().map(|form| code.matches(form).count()).sum::<usize>();
        assert!(others <= most(&allowed), "{relative} reads the wall clock {others} times");
    }
}

#[test]
fn unsafe_stands_only_in_named_modules() {
    for (path, text) in all_rust_files() {
        let relative = relative(&path);
        if relative == "tests/house.rs" || UNSAFE.contains(&relative.as_str()) {
            continue;
        }
        let found = code(&text).lines().any(|line| {
            let line = line.trim_start();
            !line.starts_with("//") && (line.contains("unsafe {") || line.contains("unsafe fn"))
        });
        assert!(!found, "{relative} holds `unsafe`");
    }
    for (name, dir, _) in HOUSE {
        let lib = fs::read_to_string(root().join(dir).join("src/lib.rs")).unwrap();
        let level = if *name == "vmm" { "deny" } else { "forbid" };
        assert!(lib.contains(&format!("#![{level}(unsafe_code)]")), "{name}: {level}(unsafe_code)");
    }
}

#[test]
fn a_file_says_what_it_is_for_and_is_not_too_long() {
    let mut wrong = Vec::new();
    for (path, text) in all_rust_files() {
        let relative = relative(&path);
        let header = text.lines().take_while(|line| line.starts_with("//!")).count();
        if header == 0 {
            wrong.push(format!("{relative}: opens without saying what it is for"));
        }
        let lines = text.lines().count();
        if lines > 500 {
            wrong.push(format!("{relative}: {lines} lines"));
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

#[test]
fn errors_are_typed_below_the_program() {
    for (name, dir, _) in HOUSE {
        let manifest = manifest(dir);
        assert!(!manifest["dependencies"].as_table().unwrap().contains_key("anyhow"), "{name}");
        assert_eq!(manifest["lints"]["workspace"].as_bool(), Some(true), "{name}");
    }
}

/// Attacks C12, K09.
#[test]
fn no_dependency_is_older_than_its_floor() {
    let lock: toml::Table = fs::read_to_string(root().join("Cargo.lock")).unwrap().parse().unwrap();
    let mut seen = BTreeSet::new();
    for package in lock["package"].as_array().unwrap() {
        let name = package["name"].as_str().unwrap();
        let version = package["version"].as_str().unwrap();
        assert!(!BANNED.contains(&name), "{name} must not be in Cargo.lock");
        if let Some((_, floor)) = FLOORS.iter().find(|(floored, _)| *floored == name) {
            assert!(numbers(version) >= numbers(floor), "{name} {version} < {floor}");
            seen.insert(name);
        }
    }
    for name in ["hyper", "hickory-proto", "idna", "tokio"] {
        assert!(seen.contains(name), "{name} is not in Cargo.lock: is this the right file?");
    }
}

/// Promise N of docs/promises.md is shown by a test whose doc comment says `Promise N.`, or the
/// row says "pending".
#[test]
fn each_promise_has_its_test_or_says_pending() {
    holds("docs/promises.md", "Promise", &["pending"]);
}

/// The same for docs/attacks.md and `Attack ID.`
#[test]
fn each_attack_has_its_test_or_says_why_not() {
    holds("docs/attacks.md", "Attack", &["pending", "later: ", "not here: "]);
}

/// Holds a table whose rows open with an id, and end with what shows them, to the doc comments that
/// cite those ids after `word`; a row that ends with one of `excuses` has no test.
fn holds(table: &str, word: &str, excuses: &[&str]) {
    let text = fs::read_to_string(root().join(table)).unwrap();
    let shown = cited(word);
    let (mut listed, mut wrong) = (BTreeSet::new(), Vec::new());
    for row in text.lines().filter(|line| line.starts_with("| ")) {
        let mut cells = row.trim_matches('|').split('|').map(str::trim);
        let Some(id) = cells.next().filter(|id| is_id(id)) else { continue };
        assert!(listed.insert(id.to_owned()), "{table}: {id} stands twice");
        let last = cells.next_back().unwrap_or_default();
        let excused = excuses.iter().any(|excuse| last.starts_with(excuse));
        match (excused, shown.contains(id)) {
            (false, false) => wrong.push(format!("{word} {id} has no test")),
            (true, true) => wrong.push(format!("{word} {id} has a test: it is not `{last}`")),
            _ => {}
        }
    }
    assert!(!listed.is_empty(), "{table} has no rows");
    wrong.extend(shown.difference(&listed).map(|id| format!("{table} has no {id}")));
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

/// The ids that doc comments name after `word` or its plural, up to the next full stop or colon.
fn cited(word: &str) -> BTreeSet<String> {
    let mut ids = BTreeSet::new();
    for (_, text) in all_rust_files() {
        for line in text.lines().map(str::trim_start).filter(|line| line.starts_with("///")) {
            for (at, _) in line.match_indices(word) {
                let list = line[at + word.len()..].trim_start_matches('s');
                let list = list.split(['.', ':']).next().unwrap_or_default();
                let words = list.split(|c: char| !c.is_ascii_alphanumeric());
                ids.extend(words.filter(|id| is_id(id)).map(str::to_owned));
            }
        }
    }
    ids
}

/// `12` or `A01`.
fn is_id(word: &str) -> bool {
    let digits = word.strip_prefix(|c: char| c.is_ascii_uppercase()).unwrap_or(word);
    !digits.is_empty() && digits.bytes().all(|b| b.is_ascii_digit())
}

#[test]
fn the_unit_names_documents_that_the_guide_installs() {
    let read = |path: &str| fs::read_to_string(root().join(path)).unwrap();
    let (unit, guide) = (read("deploy/postern.service"), read("docs/operator.md"));
    let named = unit.lines().find_map(|line| line.strip_prefix("Documentation=file://")).unwrap();
    assert!(guide.lines().any(|line| line.starts_with("install ") && line.ends_with(named)));
}

#[test]
fn every_test_target_is_run_by_the_makefile() {
    let makefile = fs::read_to_string(root().join("Makefile")).unwrap();
    let named: BTreeSet<&str> = makefile
        .split_whitespace()
        .zip(makefile.split_whitespace().skip(1))
        .filter_map(|(option, name)| (option == "--test").then_some(name))
        .collect();
    for (name, dir, _) in HOUSE.iter().filter(|(_, dir, _)| *dir != ".") {
        let Ok(entries) = fs::read_dir(root().join(dir).join("tests")) else { continue };
        for path in entries.map(|entry| entry.unwrap().path()) {
            let target =
                path.extension().is_some_and(|e| e == "rs") || path.join("main.rs").exists();
            let stem = path.file_stem().unwrap().to_str().unwrap();
            assert!(!target || named.contains(stem), "{name}: nothing runs the tests of {stem}");
        }
    }
    for target in manifest("tests")["test"].as_array().unwrap() {
        let stem = target["name"].as_str().unwrap();
        assert!(named.contains(stem), "nothing runs the tests of {stem}");
    }
}

/// The first path segment after every `crate::`, including inside `crate::{a, b::C}`.
fn named_modules(text: &str) -> Vec<&str> {
    let ident = |s: &str| s.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(s.len());
    let mut out = Vec::new();
    for (at, _) in text.match_indices("crate::") {
        let rest = &text[at + "crate::".len()..];
        match rest.strip_prefix('{').and_then(|rest| rest.split_once("};")) {
            Some((group, _)) => out.extend(group.split(',').map(|part| {
                let part = part.trim_start();
                &part[..ident(part)]
            })),
            None => out.push(&rest[..ident(rest)]),
        }
    }
    out
}

/// The sources of a module: its file and its folder, without the tests in them.
fn sources(src: &Path, module: &str) -> Vec<(PathBuf, String)> {
    let file = src.join(format!("{module}.rs"));
    let mut paths: Vec<PathBuf> = file.is_file().then_some(file).into_iter().collect();
    walk(&src.join(module), &mut paths);
    paths
        .into_iter()
        .map(|path| {
            let text = fs::read_to_string(&path).unwrap();
            let stated = |line: &&str| !line.trim_start().starts_with("//");
            let text = code(&text).lines().filter(stated).collect::<Vec<_>>().join("\n");
            (path, text)
        })
        .collect()
}

/// A file up to its tests.
fn code(text: &str) -> &str {
    text.split("\n#[cfg(test)]").next().unwrap_or(text)
}

fn is_test(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name == "tests.rs")
        || path.components().any(|part| part.as_os_str() == "tests")
}

fn all_rust_files() -> Vec<(PathBuf, String)> {
    let mut dirs = vec!["tests", "src", "fuzz", "benches"];
    for (_, dir, _) in HOUSE.iter().filter(|(_, dir, _)| *dir != ".") {
        dirs.push(dir);
    }
    dirs.into_iter().flat_map(rust_files).collect()
}

fn rust_files(dir: &str) -> Vec<(PathBuf, String)> {
    let mut paths = Vec::new();
    walk(&root().join(dir), &mut paths);
    paths.into_iter().map(|path| (path.clone(), fs::read_to_string(path).unwrap())).collect()
}

fn walk(dir: &Path, out: &mut Vec<PathBuf>) {
    let Ok(entries) = fs::read_dir(dir) else { return };
    for entry in entries {
        let path = entry.unwrap().path();
        if path.is_dir() {
            if path.file_name().is_some_and(|name| name != "target") {
                walk(&path, out);
            }
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            out.push(path);
        }
    }
}

fn manifest(dir: &str) -> toml::Table {
    fs::read_to_string(root().join(dir).join("Cargo.toml")).unwrap().parse().unwrap()
}

fn numbers(version: &str) -> Vec<u64> {
    version.split(['.', '-', '+']).map_while(|part| part.parse().ok()).collect()
}

fn relative(path: &Path) -> String {
    path.strip_prefix(root()).unwrap().to_str().unwrap().to_owned()
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}
