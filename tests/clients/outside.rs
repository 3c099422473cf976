//! The servers outside: real ones, run out of the root that `outside.sh` built, in the internet of
//! a world. Each listens at every address of that internet, the attacker's too, so that what got
//! through where it should not would be answered. Clients of that root run in guests that are namespaces.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use world::machine::built;
use world::netns::{Netns, run};
use world::poll::eventually;
use world::{Site, World};

/// How long a server may take to listen on a busy machine.
const START: Duration = Duration::from_secs(60);

/// Ports of the servers.
pub(crate) mod port {
    pub(crate) const SSH: u16 = 22;
    pub(crate) const SMTP: u16 = 25;
    pub(crate) const MARIADB: u16 = 3306;
    pub(crate) const POSTGRES: u16 = 5433;
    pub(crate) const REDIS: u16 = 6379;
}

/// The text of the one file in the repository that sshd serves.
pub(crate) const README: &str = "cloned through the router\n";

/// The running servers of one world; they end with this, or with the world's internet.
#[derive(Default)]
pub(crate) struct Outside {
    running: Vec<Child>,
}

fn root() -> PathBuf {
    built("POSTERN_OUTSIDE", "outside", "srv", "make outside")
}

/// A command of the root in a network namespace. Its `/srv` is the folder of the world.
pub(crate) fn command(world: &World, netns: &Netns, line: &str) -> Command {
    let mut command = netns.command("sh");
    let root = root();
    let enter = "mount --bind \"$1\" \"$2/srv\" && mount --bind /proc \"$2/proc\" && cd / && \
                 exec chroot \"$2\" /bin/sh -c \"$3\"";
    command.args(["-c", enter, "enter"]).arg(folder(world)).arg(root).arg(line);
    command
}

/// What the servers and clients of a world see as `/srv`.
fn folder(world: &World) -> PathBuf {
    let folder = world.dir().join("srv");
    std::fs::create_dir_all(&folder).expect("a folder");
    folder
}

impl Outside {
    /// sshd, with a git repository at `/srv/repository.git` and the key `/srv/key` for root.
    pub(crate) fn sshd(&mut self, world: &World) -> String {
        let folder = folder(world);
        world::machine::repository(&folder.join("repository.git"), README);
        Self::prepare(
            world,
            "ssh-keygen -q -t ed25519 -N '' -f /srv/key && cp /srv/key.pub /srv/authorized && \
             ssh-keygen -q -t ed25519 -N '' -f /srv/host",
        );
        let set = "-o HostKey=/srv/host -o AuthorizedKeysFile=/srv/authorized -o StrictModes=no \
                   -o UsePAM=no -o PermitRootLogin=prohibit-password -o PidFile=none -o UseDNS=no";
        self.start(
            world,
            port::SSH,
            &format!("exec /usr/sbin/sshd -D -e -f /dev/null -p {} {set}", port::SSH),
        );
        std::fs::read_to_string(folder.join("key")).expect("the key")
    }

    /// PostgreSQL, with TLS under the name of `site`; anybody is its superuser.
    pub(crate) fn postgres(&mut self, world: &World, site: &Site) {
        Self::identity(world, site);
        Self::prepare(
            world,
            "install -d -o postgres /srv/pg && chmod 755 /srv && \
             install -o postgres -m 600 /srv/tls.key /srv/pg.key && \
             setpriv --reuid=postgres --regid=postgres --init-groups \
             /usr/lib/postgresql/15/bin/initdb -A trust -N -D /srv/pg && \
             echo 'hostssl all all 0.0.0.0/0 trust' >/srv/pg/pg_hba.conf",
        );
        let set = "-c listen_addresses=0.0.0.0 -c unix_socket_directories= -c ssl=on \
                   -c ssl_cert_file=/srv/tls.pem -c ssl_key_file=/srv/pg.key \
                   -c dynamic_shared_memory_type=mmap -c fsync=off";
        self.start(
            world,
            port::POSTGRES,
            &format!(
                "exec setpriv --reuid=postgres --regid=postgres --init-groups \
                 /usr/lib/postgresql/15/bin/postgres -D /srv/pg -p {} {set}",
                port::POSTGRES
            ),
        );
    }

    /// MariaDB, which greets first; anybody is anybody.
    pub(crate) fn mariadb(&mut self, world: &World) {
        Self::prepare(
            world,
            "install -d -o nobody /srv/maria && mariadb-install-db --no-defaults --user=nobody \
             --datadir=/srv/maria --auth-root-authentication-method=normal --skip-test-db",
        );
        let set = "--datadir=/srv/maria --socket=/srv/maria/sock --bind-address=0.0.0.0 \
                   --skip-grant-tables --skip-networking=0 --skip-name-resolve";
        self.start(
            world,
            port::MARIADB,
            &format!(
                "exec /usr/sbin/mariadbd --no-defaults --user=nobody --port={} {set}",
                port::MARIADB
            ),
        );
    }

    /// Redis, in whose protocol the client speaks first.
    pub(crate) fn redis(&mut self, world: &World) {
        let set = "--bind 0.0.0.0 --protected-mode no --save '' --appendonly no --dir /srv";
        self.start(world, port::REDIS, &format!("exec redis-server --port {} {set}", port::REDIS));
    }

    /// An SMTP server, with STARTTLS under the name of `site`.
    pub(crate) fn smtp(&mut self, world: &World, site: &Site) {
        Self::identity(world, site);
        let script = format!(
            "import ssl, asyncio\n\
             from aiosmtpd.smtp import SMTP\n\
             from aiosmtpd.handlers import Sink\n\
             tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)\n\
             tls.load_cert_chain('/srv/tls.pem', '/srv/tls.key')\n\
             async def main():\n\
             \x20   make = lambda: SMTP(Sink(), tls_context=tls, hostname='mail')\n\
             \x20   server = await asyncio.get_running_loop().create_server(make, '0.0.0.0', {})\n\
             \x20   await server.serve_forever()\n\
             asyncio.run(main())\n",
            port::SMTP,
        );
        std::fs::write(folder(world).join("smtp.py"), script).expect("a file");
        self.start(world, port::SMTP, "exec python3 -W ignore /srv/smtp.py");
    }

    /// The world's authority, as `/srv/ca.pem`.
    pub(crate) fn trust(world: &World) {
        let pem = world.authority.pem();
        std::fs::write(folder(world).join("ca.pem"), pem).expect("a file");
    }

    /// `/srv/tls.pem` and `/srv/tls.key`, signed by the world's authority.
    fn identity(world: &World, site: &Site) {
        Self::trust(world);
        let folder = folder(world);
        let (certificate, key) = world.authority.identity(&site.name);
        std::fs::write(folder.join("tls.pem"), certificate).expect("a file");
        std::fs::write(folder.join("tls.key"), key).expect("a file");
    }

    fn prepare(world: &World, line: &str) {
        run(&mut command(world, &world.internet, line));
    }

    /// Starts a server and waits until it listens.
    fn start(&mut self, world: &World, port: u16, line: &str) {
        let log = world.dir().join(format!("server-{port}.log"));
        let file = std::fs::File::create(&log).expect("its log");
        let mut command = command(world, &world.internet, line);
        command.stderr(file.try_clone().expect("its log")).stdout(file).stdin(Stdio::null());
        let mut child = command.spawn().expect("start a server");
        let listens = || {
            if let Ok(Some(status)) = child.try_wait() {
                panic!("{line}: {status}\n{}", std::fs::read_to_string(&log).unwrap_or_default());
            }
            let out = world.internet.command("ss").args(["-Hltn"]).output().expect("ss");
            let out = String::from_utf8_lossy(&out.stdout).into_owned();
            out.lines().any(|line| line.contains(&format!("0.0.0.0:{port} "))).then_some(())
        };
        eventually(&format!("port {port} is listened on"), START, listens);
        self.running.push(child);
    }
}

impl Drop for Outside {
    fn drop(&mut self) {
        for child in &mut self.running {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
