//! A sandbox with a booted Debian guest, and the ways to work in it.

use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;

use serde_json::Value;
use world::daemon::Ran;
use world::{Site, World, allow};

/// A running guest in a world of its own.
pub(crate) struct Machine {
    pub(crate) world: World,
    pub(crate) name: String,
    /// What `create` answered.
    pub(crate) created: Value,
    /// What its policy allows.
    pub(crate) api: Site,
    /// A second allowed site, which serves a git repository.
    pub(crate) forge: Site,
}

impl Machine {
    /// A world that has the guest image.
    pub(crate) fn world() -> World {
        let image = std::env::var_os("POSTERN_IMAGE").map_or_else(
            || {
                let own = std::env::current_exe().expect("our own path");
                own.ancestors().nth(3).expect("a target folder").join("image")
            },
            PathBuf::from,
        );
        assert!(image.join("vmlinuz").exists(), "{} is missing: `make image`", image.display());
        World::with(&format!("[qemu]\nimage = {:?}\n", image.display().to_string()))
    }

    pub(crate) fn boot() -> Self {
        let world = Self::world();
        let (api, forge) = (world.site("api"), world.site("forge"));
        let policy = world.dir().join("machine.toml");
        std::fs::write(&policy, allow(&[&api, &forge])).expect("write the policy");
        let policy = policy.to_string_lossy().into_owned();
        let name = world.machine_name();
        let made = world.cli(&["create", &name, "--policy", &policy, "--json"]).ok();
        let created = made.json_lines().pop().expect("a result");
        let machine = Self { world, name, created, api, forge };
        // What update-ca-certificates does, for one certificate.
        let install = "cd /etc/ssl/certs && cat > world.pem && cat world.pem >> ca-certificates.crt \
                       && ln -s world.pem $(openssl x509 -hash -noout -in world.pem).0";
        machine.feed(install, machine.world.authority.pem().as_bytes()).ok();
        machine
    }

    /// The guest that tests share which leave it as it was.
    pub(crate) fn shared() -> &'static Self {
        static SHARED: OnceLock<Machine> = OnceLock::new();
        SHARED.get_or_init(Self::boot)
    }

    /// Runs a command in the guest.
    pub(crate) fn exec(&self, words: &[&str]) -> Ran {
        self.world.cli(&[&["exec", &self.name, "--"], words].concat())
    }

    /// Runs a line of shell in the guest.
    pub(crate) fn sh(&self, line: &str) -> Ran {
        self.exec(&["sh", "-c", line])
    }

    /// The same with something on its standard input.
    pub(crate) fn feed(&self, line: &str, input: &[u8]) -> Ran {
        self.world.daemon().cli_with_input(&["exec", &self.name, "--", "sh", "-c", line], input)
    }

    /// The process that is the guest.
    pub(crate) fn pid(&self) -> i64 {
        self.created["pid"].as_i64().unwrap_or_else(|| panic!("no pid in {}", self.created))
    }

    /// Processes that bear its name, by id.
    pub(crate) fn processes(&self) -> String {
        let name = format!("-name postern-{}", self.name);
        let found = Command::new("pgrep").args(["-f", "--", &name]).output().expect("pgrep");
        String::from_utf8_lossy(&found.stdout).trim().to_owned()
    }

    /// Puts a small git repository on the forge; the text of its one file.
    pub(crate) fn serve_repository(&self) -> &'static str {
        const TEXT: &str = "cloned through the router\n";
        let work = self.world.dir().join("work");
        let bare = self.world.dir().join("www/repository.git");
        std::fs::create_dir_all(&work).expect("a folder");
        std::fs::write(work.join("README"), TEXT).expect("a file");
        let git = |dir: &PathBuf, words: &[&str]| {
            let identity = ["-c", "user.name=a", "-c", "user.email=a@example.com"];
            world::netns::run(Command::new("git").current_dir(dir).args(identity).args(words));
        };
        git(&work, &["init", "-q", "-b", "main"]);
        git(&work, &["add", "README"]);
        git(&work, &["commit", "-q", "-m", "First"]);
        git(&work, &["clone", "-q", "--bare", ".", &bare.to_string_lossy()]);
        git(&bare, &["update-server-info"]);
        self.world.origin.serve_files(&self.forge.name, self.world.dir().join("www"));
        TEXT
    }
}
