//! A namespace with a tap for one guest, and the ways to speak with that guest's agent.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use agent::{Decoder, Exec, FromGuest, FromHost, Hello, Message, Status, VERSION};
use nix::sched::{CloneFlags, setns, unshare};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use policy::Slot;
use policy::net::{AGENT_PORT, GUEST_IP};
use tempfile::TempDir;
use vmm::{Error, Hypervisor, Machine, Process, Qemu, tap};

pub(crate) const SLOT: u16 = 65_001;
pub(crate) const UID: u32 = 2_000_901;
pub(crate) const BOOT: Duration = Duration::from_secs(120);

/// A network namespace and a directory, gone with the test.
pub(crate) struct World {
    netns: File,
    pub(crate) dir: TempDir,
}

impl Drop for World {
    /// A test that failed may have left its machine.
    fn drop(&mut self) {
        let ours = |pid: &i32| {
            fs::metadata(format!("/proc/{pid}")).is_ok_and(|process| process.uid() == UID)
        };
        let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
        let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        for pid in pids.filter(ours) {
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
    }
}

impl World {
    pub(crate) fn new() -> Self {
        let make = || {
            unshare(CloneFlags::CLONE_NEWNET).expect("root");
            File::open("/proc/thread-self/ns/net").expect("proc")
        };
        let netns = thread::spawn(make).join().expect("a namespace");
        let world = Self { netns, dir: TempDir::new().expect("a directory") };
        let tap = slot().tap();
        world.within(move || {
            drop(tap::create(slot(), None).expect("made"));
            for arguments in [
                format!("link set {tap} address 02:00:00:00:00:01 up"),
                format!("address add 169.254.100.1/30 dev {tap}"),
                format!(
                    "neighbour add {GUEST_IP} lladdr 02:00:00:00:00:02 dev {tap} nud permanent"
                ),
            ] {
                let status = Command::new("ip").args(arguments.split(' ')).status();
                assert!(status.expect("ip runs").success(), "ip {arguments}");
            }
        });
        world
    }

    pub(crate) fn within<T: Send>(&self, act: impl FnOnce() -> T + Send) -> T {
        thread::scope(|scope| {
            let enter = || {
                setns(&self.netns, CloneFlags::CLONE_NEWNET).expect("root");
                act()
            };
            scope.spawn(enter).join().expect("holds inside the world")
        })
    }

    pub(crate) fn machine(&self, name: &str) -> Machine {
        let image = image();
        let run_dir = self.dir.path().join("run");
        Machine {
            name: name.parse().expect("a name"),
            tenant: "test".parse().expect("a name"),
            slot: slot(),
            memory_mib: 256,
            vcpus: 1,
            kernel: self.dir.path().join("image/vmlinuz"),
            initrd: self.dir.path().join("image/initrd.img"),
            cmdline: String::new(),
            base: self.dir.path().join("image/root.ext4"),
            copies: self.dir.path().join("copies"),
            image,
            disk: self.dir.path().join("disk.qcow2"),
            memory: self.dir.path().join("memory/file"),
            state: self.dir.path().join("state"),
            run_dir,
            uid: UID,
        }
    }

    pub(crate) async fn start(&self, qemu: &Qemu, machine: &Machine) -> Result<Process, Error> {
        let tap = self.within(|| tap::attach(slot()).expect("free"));
        qemu.start(machine, tap).await
    }

    /// A connection to the agent, as soon as there is one.
    pub(crate) fn greet(&self) -> Agent {
        let deadline = Instant::now() + BOOT;
        let address = (GUEST_IP, AGENT_PORT).into();
        // Shorter than the second after which a lost SYN would be sent again.
        let patience = Duration::from_millis(200);
        loop {
            if let Ok(stream) = self.within(|| TcpStream::connect_timeout(&address, patience)) {
                stream.set_read_timeout(Some(BOOT)).expect("set");
                let mut agent = Agent { stream, decoder: Decoder::default() };
                match agent.hear().expect("a greeting") {
                    FromGuest::Hello(Hello { version: VERSION, .. }) => return agent,
                    other => panic!("{other:?}"),
                }
            }
            assert!(Instant::now() < deadline, "no greeting; console:\n{}", self.console());
            thread::sleep(Duration::from_millis(20));
        }
    }

    pub(crate) fn run(&self, argv: &[&str]) -> Outcome {
        self.run_with(argv, Vec::new())
    }

    pub(crate) fn run_with(&self, argv: &[&str], input: Vec<u8>) -> Outcome {
        let mut agent = self.greet();
        let argv = argv.iter().map(|&word| word.to_owned()).collect();
        agent.say(&FromHost::Exec(Exec { argv, ..Exec::default() }));
        let mut speaker = Agent {
            stream: agent.stream.try_clone().expect("a second handle"),
            decoder: Decoder::default(),
        };
        let speaking = thread::spawn(move || {
            for portion in input.chunks(agent::MAX_PAYLOAD) {
                speaker.say(&FromHost::Stdin(portion.to_vec()));
            }
            speaker.say(&FromHost::StdinEnd);
        });
        let mut outcome = Outcome { stdout: Vec::new(), stderr: Vec::new(), end: None };
        while let Some(message) = agent.hear() {
            match message {
                FromGuest::Stdout(bytes) => outcome.stdout.extend(bytes),
                FromGuest::Stderr(bytes) => outcome.stderr.extend(bytes),
                end => outcome.end = Some(end),
            }
        }
        speaking.join().expect("said");
        outcome
    }

    pub(crate) fn console(&self) -> String {
        String::from_utf8_lossy(
            &fs::read(self.dir.path().join("run/console.log")).unwrap_or_default(),
        )
        .into_owned()
    }
}

pub(crate) struct Agent {
    pub(crate) stream: TcpStream,
    pub(crate) decoder: Decoder<FromGuest>,
}

impl Agent {
    pub(crate) fn say(&mut self, message: &FromHost) {
        let mut bytes = Vec::new();
        message.encode(&mut bytes).expect("short");
        self.stream.write_all(&bytes).expect("the guest reads");
    }

    pub(crate) fn hear(&mut self) -> Option<FromGuest> {
        let mut portion = vec![0; 64 * 1024];
        loop {
            if let Some(message) = self.decoder.message().expect("well formed") {
                return Some(message);
            }
            match self.stream.read(&mut portion).expect("the guest speaks") {
                0 => return None,
                length => self.decoder.push(&portion[..length]),
            }
        }
    }
}

#[derive(Debug)]
pub(crate) struct Outcome {
    pub(crate) stdout: Vec<u8>,
    pub(crate) stderr: Vec<u8>,
    pub(crate) end: Option<FromGuest>,
}

impl Outcome {
    pub(crate) fn text(&self) -> &str {
        std::str::from_utf8(&self.stdout).expect("text").trim()
    }
    pub(crate) fn ended(&self, status: Status) {
        assert_eq!(
            self.end,
            Some(FromGuest::Exit(status)),
            "{}",
            String::from_utf8_lossy(&self.stderr)
        );
    }
}

pub(crate) fn slot() -> Slot {
    Slot::new(SLOT).expect("in range")
}

pub(crate) fn image() -> PathBuf {
    let default = || Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/image");
    std::env::var_os("POSTERN_IMAGE").map_or_else(default, PathBuf::from)
}

pub(crate) fn qemu() -> Qemu {
    Qemu::new("/usr/bin/qemu-system-x86_64")
}

/// What a stop must leave: the disk and the logs.
pub(crate) fn assert_nothing_is_left(world: &World, process: &Process) {
    let host = process.host.as_ref().expect("a process");
    assert!(!host.is_alive());
    for group in &host.groups {
        assert!(!group.exists(), "{}", group.display());
    }
    assert!(!process.control_socket().exists() && !process.console_socket().exists());
    drop(world.within(|| tap::attach(slot()).expect("nobody holds the tap")));
}
