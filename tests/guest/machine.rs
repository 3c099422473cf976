//! The guest of these tests: what it is allowed to reach.

use std::ops::Deref;
use std::path::Path;
use std::sync::OnceLock;

use world::machine;
use world::{Site, World, allow};

/// A running guest in a world of its own.
pub(crate) struct Machine {
    machine: machine::Machine,
    /// What its policy allows.
    pub(crate) api: Site,
    /// A second allowed site, which serves a git repository.
    pub(crate) forge: Site,
}

impl Deref for Machine {
    type Target = machine::Machine;

    fn deref(&self) -> &machine::Machine {
        &self.machine
    }
}

impl Machine {
    /// A world that has the guest image.
    pub(crate) fn world() -> World {
        Self::world_of(&machine::image())
    }

    /// The same with this image. A wake takes long on a busy machine, and one that boots as long as a creation.
    pub(crate) fn world_of(image: &Path) -> World {
        let image = image.display().to_string();
        World::with(&format!(
            "[sleep]\non_idle = \"never\"\nwake_timeout = \"90s\"\n\
             [qemu]\nboot_timeout = \"3m\"\nimage = {image:?}\n"
        ))
    }

    pub(crate) fn boot() -> Self {
        let world = Self::world();
        let (api, forge) = (world.site("api"), world.site("forge"));
        let policy = allow(&[&api, &forge]);
        Self { machine: machine::Machine::boot(world, &policy), api, forge }
    }

    /// The guest that tests share which leave it as it was.
    pub(crate) fn shared() -> &'static Self {
        static SHARED: OnceLock<Machine> = OnceLock::new();
        SHARED.get_or_init(Self::boot)
    }

    /// Puts a small git repository on the forge; the text of its one file.
    pub(crate) fn serve_repository(&self) -> &'static str {
        const TEXT: &str = "cloned through the router\n";
        machine::repository(&self.world.dir().join("www/repository.git"), TEXT);
        self.world.origin.serve_files(&self.forge.name, self.world.dir().join("www"));
        TEXT
    }
}
