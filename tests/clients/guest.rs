//! The guest of these tests, what its policy lets it reach, and a program in it with its denied twins.
//! One guest for all tests: it takes its time to boot.

use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use world::daemon::Ran;
use world::machine::{Machine, built, repository};
use world::origin::H2;
use world::{Site, World};

use crate::outside::{Outside, README, port};

/// A program learns of a refusal at once. What it takes to start, in a guest that is emulated on a busy
/// machine, it takes to be let through, too: a refusal may take as long twice, and this.
const SOON: Duration = Duration::from_secs(20);

/// What `image.sh` built.
fn image() -> PathBuf {
    built("POSTERN_IMAGE_CLIENTS", "image-clients", "root.ext4", "make image-clients")
}

/// The wheels beside the image.
pub(crate) fn wheels() -> PathBuf {
    image().join("wheels")
}

/// A booted guest and what it may reach.
pub(crate) struct Lab {
    pub(crate) machine: Machine,
    /// HTTPS and HTTP, with HTTP/2.
    pub(crate) api: Site,
    /// A git repository, over HTTPS and SSH.
    pub(crate) forge: Site,
    /// A package index for pip, over HTTPS.
    pub(crate) index: Site,
    /// A package registry for npm, over HTTPS.
    pub(crate) registry: Site,
    /// A package mirror for apt, over HTTP.
    pub(crate) mirror: Site,
    /// PostgreSQL.
    pub(crate) database: Site,
    turn: Mutex<()>,
    _outside: Outside,
}

/// The guest of all tests: each leaves it as good as it was.
pub(crate) fn lab() -> &'static Lab {
    static LAB: OnceLock<Lab> = OnceLock::new();
    LAB.get_or_init(Lab::boot)
}

/// A program, and what it says.
pub(crate) struct Program<'a> {
    /// Its command line; `HOST` stands for the host.
    pub(crate) line: &'a str,
    /// What it prints when it is let through.
    pub(crate) says: &'static str,
    /// What it prints of a name that it is not told.
    pub(crate) unknown: &'static str,
    /// What it prints when its connection is refused.
    pub(crate) refused: &'static str,
    /// The port it connects to.
    pub(crate) port: u16,
}

impl Lab {
    fn boot() -> Self {
        let image = image();
        let world = World::of_machines(&image, "memory = \"1G\"\n");
        let mut outside = Outside::default();
        let [api, forge, index, registry, mirror, database] =
            [&format!("{H2}api"), "forge", "index", "registry", "mirror", "db"]
                .map(|label| world.site(label));
        let key = outside.sshd(&world);
        outside.postgres(&world, &database);
        let names =
            [&api, &forge, &index, &registry, &mirror].map(|site| format!("{:?}", site.name));
        let policy = format!(
            "[[rule]]\nallow = [{}]\n\
             [[rule]]\nallow = [{:?}]\nports = [{}]\n\
             [[rule]]\nallow = [{:?}]\nports = [{}]\n",
            names.join(", "),
            forge.name,
            port::SSH,
            database.name,
            port::POSTGRES,
        );
        let machine = Machine::boot(world, &policy);
        machine.feed("umask 077; cat > /opt/key", key.as_bytes()).ok();
        let www = |name: &str| machine.world.dir().join("www").join(name);
        repository(&www("forge").join("repository.git"), README);
        machine.world.origin.serve_files(&forge.name, www("forge"));
        Self {
            machine,
            api,
            forge,
            index,
            registry,
            mirror,
            database,
            turn: Mutex::default(),
            _outside: outside,
        }
    }

    /// The guest for one program at a time: it has one processor.
    pub(crate) fn turn(&self) -> MutexGuard<'_, ()> {
        self.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs a line of shell in the guest.
    pub(crate) fn sh(&self, line: &str) -> Ran {
        self.machine.sh(line)
    }
}

impl Program<'_> {
    fn run(&self, lab: &Lab, host: &str) -> (Ran, Duration) {
        let began = Instant::now();
        let ran = lab.sh(&self.line.replace("HOST", host));
        (ran, began.elapsed())
    }

    /// It reaches `site`. A host that no rule names is not told; the same with an address that the guest
    /// has by other means is refused in the program's own protocol. Nothing of either is on the wire.
    pub(crate) fn holds(&self, lab: &Lab, site: &Site) {
        let _turn = lab.turn();
        let world = &lab.machine.world;
        let (reached, enough) = self.run(lab, &site.name);
        let reached = reached.ok();
        assert!(reached.stdout.contains(self.says), "{reached:?}");

        let (unknown, forced) = (world.attacker(), world.attacker());
        lab.sh(&format!("echo {} {} >> /etc/hosts", forced.ip, forced.name)).ok();
        for (sink, said) in [(&unknown, self.unknown), (&forced, self.refused)] {
            let (ran, took) = self.run(lab, &sink.name);
            assert_ne!(ran.code, 0, "{}: {ran:?}", sink.name);
            assert!(!ran.stdout.contains(self.says), "{}: {ran:?}", sink.name);
            let both = format!("{}{}", ran.stdout, ran.stderr);
            assert!(both.contains(said), "{}: not {said:?}: {both}", sink.name);
            assert!(took < 2 * enough + SOON, "{}: {took:?}, not {enough:?}", sink.name);
            assert_eq!(world.sent_to(sink.ip), [], "{}", sink.name);
            assert_eq!(world.names.asked(&sink.name), [], "{}", sink.name);
        }
        let name = &lab.machine.name;
        let question = [("kind", "dns"), ("name", &*unknown.name), ("code", "no-rule")];
        world.event(name, &question);
        let to = forced.at(self.port).to_string();
        let code = if matches!(self.port, 80 | 443) { "no-rule" } else { "no-name" };
        world.event(name, &[("outcome", "deny"), ("destination", &to), ("code", code)]);
    }
}
