//! A sandbox with a booted Debian guest, and the ways to work in it. Its world is its own: it outlives the
//! daemon, and is found by its name and ended with the test process.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde_json::Value;

use crate::daemon::Ran;
use crate::netns::run;
use crate::poll::eventually;
use crate::world::World;

/// A running guest in a world of its own.
#[derive(Debug)]
pub struct Machine {
    /// Its world.
    pub world: World,
    /// The sandbox's name.
    pub name: String,
    /// What `create` answered.
    pub created: Value,
}

/// A folder that is built, not committed: what the environment says, or beside the test's own target.
///
/// # Panics
/// When it does not hold `file`: `remedy` is what makes it.
#[must_use]
pub fn built(variable: &str, folder: &str, file: &str, remedy: &str) -> PathBuf {
    let path = std::env::var_os(variable).map_or_else(
        || {
            let own = std::env::current_exe().expect("our own path");
            own.ancestors().nth(3).expect("a target folder").join(folder)
        },
        PathBuf::from,
    );
    assert!(path.join(file).exists(), "{} is missing: `{remedy}`", path.join(file).display());
    path
}

/// The image that `make image` builds.
#[must_use]
pub fn image() -> PathBuf {
    built("POSTERN_IMAGE", "image", "vmlinuz", "make image")
}

/// Makes a bare git repository at `bare` with one file, `README`, of this text; served by anything
/// that serves files.
///
/// # Panics
/// When git fails.
pub fn repository(bare: &Path, text: &str) {
    let work = bare.with_extension("work");
    std::fs::create_dir_all(&work).expect("a folder");
    std::fs::write(work.join("README"), text).expect("a file");
    let git = |dir: &Path, words: &[&str]| {
        let identity = ["-c", "user.name=a", "-c", "user.email=a@example.com"];
        run(Command::new("git").current_dir(dir).args(identity).args(words));
    };
    git(&work, &["init", "-q", "-b", "main"]);
    git(&work, &["add", "README"]);
    git(&work, &["commit", "-q", "-m", "First"]);
    git(&work, &["clone", "-q", "--bare", ".", &bare.to_string_lossy()]);
    git(bare, &["update-server-info"]);
}

impl World {
    /// A world whose microVMs have this image and do not sleep by themselves, with more configuration in
    /// the section `[qemu]`.
    #[must_use]
    pub fn of_machines(image: &Path, qemu: &str) -> Self {
        let mut all: toml::Table = qemu.parse().expect("TOML");
        // On a busy machine without KVM a boot takes long.
        all.entry("boot_timeout").or_insert_with(|| "3m".into());
        all.insert("image".into(), image.display().to_string().into());
        Self::with(&format!("[sleep]\non_idle = \"never\"\n[qemu]\n{all}"))
    }
}

impl Machine {
    /// Boots a guest with this policy (TOML), which then trusts the world's authority.
    ///
    /// # Panics
    /// When it does not boot.
    #[must_use]
    pub fn boot(world: World, policy: &str) -> Self {
        Self::boot_with(world, policy, &[])
    }

    /// The same with more words for `postern create`.
    ///
    /// # Panics
    /// When it does not boot.
    #[must_use]
    pub fn boot_with(world: World, policy: &str, words: &[&str]) -> Self {
        let file = world.dir().join("machine.toml");
        std::fs::write(&file, policy).expect("write the policy");
        let file = file.to_string_lossy().into_owned();
        let name = world.machine_name();
        let create = [&["create", &name, "--policy", &file, "--json"], words].concat();
        let made = world.cli(&create).ok();
        let created = made.json_lines().pop().expect("a result");
        let machine = Self { world, name, created };
        // What update-ca-certificates does, for one certificate.
        let install = "cd /etc/ssl/certs && cat > world.pem && cat world.pem >> ca-certificates.crt \
                       && ln -s world.pem $(openssl x509 -hash -noout -in world.pem).0";
        machine.feed(install, machine.world.authority.pem().as_bytes()).ok();
        machine
    }

    /// Runs a command in the guest.
    pub fn exec(&self, words: &[&str]) -> Ran {
        self.world.cli(&[&["exec", &self.name, "--"], words].concat())
    }

    /// Runs a line of shell in the guest.
    pub fn sh(&self, line: &str) -> Ran {
        self.exec(&["sh", "-c", line])
    }

    /// The same with something on its standard input.
    pub fn feed(&self, line: &str, input: &[u8]) -> Ran {
        self.world.daemon().cli_with_input(&["exec", &self.name, "--", "sh", "-c", line], input)
    }

    /// The process that is the guest.
    ///
    /// # Panics
    /// When `create` told none.
    #[must_use]
    pub fn pid(&self) -> i64 {
        self.created["pid"].as_i64().unwrap_or_else(|| panic!("no pid in {}", self.created))
    }

    /// What `show` says of it.
    #[must_use]
    pub fn shown(&self) -> Value {
        self.world.api("GET", &format!("/v1/sandboxes/{}", self.name), &[]).json
    }

    /// How often it was woken.
    ///
    /// # Panics
    /// When nothing says so.
    #[must_use]
    pub fn wakes(&self) -> u64 {
        self.shown()["wakes"].as_u64().expect("a number of wakes")
    }

    /// Waits until it is in this state, for as long as a guest may take on a busy machine without KVM.
    ///
    /// # Panics
    /// When it is not in time.
    pub fn until(&self, state: &str, what: &str) {
        eventually(&format!("{what}: {state}"), Duration::from_secs(90), || {
            (self.shown()["state"] == state).then_some(())
        });
    }

    /// Puts it to sleep, idle or not.
    ///
    /// # Panics
    /// When it stays awake.
    pub fn standby(&self) {
        self.world.cli(&["standby", &self.name]).ok();
    }

    /// Processes that bear its name, by id.
    ///
    /// # Panics
    /// Without `pgrep`.
    #[must_use]
    pub fn processes(&self) -> String {
        let name = format!("-name postern-{}", self.name);
        let found = Command::new("pgrep").args(["-f", "--", &name]).output().expect("pgrep");
        String::from_utf8_lossy(&found.stdout).trim().to_owned()
    }
}
