//! Sessions of real programs through a guest's sleep: one that the guest holds with a real server outside, and
//! one that somebody outside holds with the guest.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

use world::daemon::program;
use world::poll::eventually;

use crate::guest::{Lab, lab};
use crate::outside::port;

/// How long anything may take on a busy machine without KVM.
const PATIENCE: Duration = Duration::from_secs(90);
/// Where the guest's own sshd listens.
const SSHD: u16 = 2222;
/// What is held, and how often it is put to sleep.
const NIGHTS: u64 = 4;

/// psql in the guest, which reads statements from a pipe that never ends.
struct Session<'a> {
    lab: &'a Lab,
    lines: usize,
}

impl<'a> Session<'a> {
    fn begin(lab: &'a Lab) -> Self {
        let line = format!(
            "mkfifo /run/sql && : >/run/told && {{ setsid psql 'host={} port={} user=postgres \
             dbname=postgres sslmode=verify-full sslrootcert=/etc/ssl/certs/world.pem' \
             -qAt <>/run/sql >/run/told 2>&1 & }}",
            lab.database.name,
            port::POSTGRES,
        );
        lab.sh(&line).ok();
        Self { lab, lines: 0 }
    }

    fn say(&self, statement: &str) {
        self.lab.sh(&format!("echo \"{statement};\" >/run/sql")).ok();
    }

    /// The next line that it prints.
    fn hear(&mut self) -> String {
        self.lines += 1;
        eventually("an answer of the database", PATIENCE, || {
            let told = self.lab.sh("cat /run/told").ok().stdout;
            told.lines().nth(self.lines - 1).map(str::to_owned)
        })
    }

    fn ask(&mut self, statement: &str) -> String {
        self.say(statement);
        self.hear()
    }
}

/// Promise 31. Under TLS, with a table that only this session has.
#[test]
fn a_session_with_a_database_outlives_the_sleep_of_its_guest() {
    let lab = lab();
    let _turn = lab.turn();
    let mut session = Session::begin(lab);
    session.say("create temp table night (n int); insert into night values (0)");
    let backend = session.ask("select pg_backend_pid()");
    assert!(backend.parse::<u32>().is_ok(), "{backend}");
    for night in 1..=NIGHTS {
        lab.machine.standby();
        assert_eq!(lab.machine.processes(), "", "night {night}");
        let told = session.ask("update night set n = n + 1 returning pg_backend_pid(), n");
        assert_eq!(told, format!("{backend}|{night}"), "the same session");
    }
    // It is the answer that wakes who has fallen asleep over the question.
    let wakes = lab.machine.wakes();
    session.say("select n, pg_sleep(8) from night");
    lab.machine.standby();
    eventually("the answer wakes it", PATIENCE, || (lab.machine.wakes() > wakes).then_some(()));
    assert_eq!(session.hear(), format!("{NIGHTS}|"));
    lab.sh("pkill psql; rm /run/sql /run/told").ok();
}

/// A shell in the guest, by ssh.
struct Shell {
    ssh: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl Shell {
    fn open(lab: &Lab) -> Self {
        let start = format!(
            "mkdir -p /run/sshd && rm -f /root/own* && ssh-keygen -q -t ed25519 -N '' -f /root/own && \
             ssh-keygen -A >/dev/null && \
             /usr/sbin/sshd -f /dev/null -p {SSHD} -o AuthorizedKeysFile=/root/own.pub \
             -o StrictModes=no -o UsePAM=no -o UseDNS=no && cat /root/own"
        );
        let key = lab.sh(&start).ok().stdout;
        let world = &lab.machine.world;
        let file = world.dir().join("own");
        std::fs::write(&file, key).expect("the key");
        let private = std::os::unix::fs::PermissionsExt::from_mode(0o600);
        std::fs::set_permissions(&file, private).expect("its mode");
        let proxy = format!(
            "ProxyCommand=env POSTERN_SOCKET={} {} connect {} {SSHD}",
            world.daemon().socket().display(),
            program().display(),
            lab.machine.name,
        );
        let mut ssh = Command::new("ssh");
        ssh.args(["-F", "none", "-o", &proxy, "-o", "StrictHostKeyChecking=no"]);
        ssh.args(["-o", "UserKnownHostsFile=/dev/null", "-o", "BatchMode=yes", "-i"]).arg(file);
        ssh.args(["root@guest", "exec sh"]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut ssh = ssh.spawn().expect("run ssh");
        let (to, from) = (ssh.stdin.take().expect("a pipe"), ssh.stdout.take().expect("a pipe"));
        Self { ssh, to, from: BufReader::new(from) }
    }

    fn ask(&mut self, line: &str) -> String {
        self.to.write_all(format!("{line}\n").as_bytes()).expect("ssh reads");
        let mut said = String::new();
        self.from.read_line(&mut said).expect("ssh says");
        said.trim().to_owned()
    }
}

impl Drop for Shell {
    fn drop(&mut self) {
        let _ = self.ssh.kill();
        let _ = self.ssh.wait();
    }
}

/// Promise 31. What is typed wakes the guest.
#[test]
fn a_shell_by_ssh_outlives_the_sleep_of_its_guest() {
    let lab = lab();
    let _turn = lab.turn();
    let mut shell = Shell::open(lab);
    let before = shell.ask("said=before; echo $$ $said");
    assert!(before.ends_with(" before"), "{before}");
    for night in 1..=NIGHTS {
        lab.machine.standby();
        let wakes = lab.machine.wakes();
        assert_eq!(lab.machine.processes(), "", "night {night}");
        assert_eq!(shell.ask("echo $$ $said"), before, "the same shell, night {night}");
        eventually("it was woken", PATIENCE, || (lab.machine.wakes() > wakes).then_some(()));
    }
    drop(shell);
    lab.sh("pkill sshd; rm -f /root/own /root/own.pub").ok();
}
