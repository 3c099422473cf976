//! Protocols that carry no name on ports that a rule names, with their own servers and clients: let
//! through by the name that DNS told for the address, refused at once without one.

use std::time::{Duration, Instant};

use world::daemon::Ran;
use world::guest::Guest;
use world::world::EGRESS;
use world::{Site, World};

use crate::outside::{Outside, README, command, port};

/// A refusal comes within a second or so; what the client takes to start on a busy machine, it takes to be
/// let through, too.
const SOON: Duration = Duration::from_secs(6);

/// One protocol and its client.
struct Case {
    port: u16,
    /// The client's command line; `HOST` stands for the host.
    line: &'static str,
    /// What it prints when it is let through.
    says: &'static str,
}

impl Case {
    fn run(&self, world: &World, guest: &Guest<'_>, host: &str) -> (Ran, Duration) {
        let began = Instant::now();
        let line = self.line.replace("HOST", host);
        let output = command(world, &guest.netns, &line).output().expect("run a client");
        (Ran::of(&output), began.elapsed())
    }

    /// `site` is reached by its name. A name that no rule names is not told, and its address, on the
    /// same port, is refused; so is the allowed name's address to a guest that was not told it.
    fn holds(&self, world: &World, site: &Site) {
        let rule = format!("[[rule]]\nallow = [{:?}]\nports = [{}]\n", site.name, self.port);
        let guest = world.guest(&rule);
        let (reached, enough) = self.run(world, &guest, &site.name);
        let reached = reached.ok();
        assert!(reached.stdout.contains(self.says), "{reached:?}");
        let record =
            guest.event(&[("kind", "connection"), ("outcome", "allow"), ("name", &site.name)]);
        assert!(record["egress"].as_str().is_some_and(|at| at.starts_with(&EGRESS.to_string())));

        let sink = world.attacker();
        let untold = world.guest(&rule);
        let others = [(&guest, &*sink.name), (&guest, &*sink.ip.to_string())];
        for (guest, host) in others.into_iter().chain([(&untold, &*site.ip.to_string())]) {
            let before = world.sent_to(site.ip).len();
            let (refused, took) = self.run(world, guest, host);
            assert_ne!(refused.code, 0, "{host}: {refused:?}");
            assert!(took < enough + SOON, "{host}: {took:?}, not {enough:?}");
            assert!(!refused.stdout.contains(self.says), "{host}: {refused:?}");
            assert_eq!(world.sent_to(site.ip).len(), before, "{host}");
        }
        assert_eq!(world.sent_to(sink.ip), []);
        assert_eq!(world.names.asked(&sink.name), []);
        guest.event(&[("kind", "dns"), ("name", &sink.name), ("code", "no-rule")]);
        let to = sink.at(self.port).to_string();
        guest.event(&[("outcome", "deny"), ("code", "no-name"), ("destination", &to)]);
        let to = site.at(self.port).to_string();
        untold.event(&[("outcome", "deny"), ("code", "no-name"), ("destination", &to)]);
    }
}

/// Promises 1 and 5. Both speak first.
#[test]
fn git_clones_over_ssh_from_a_real_sshd() {
    let world = World::new();
    let mut outside = Outside::default();
    outside.sshd(&world);
    let case = Case {
        port: port::SSH,
        line: "rm -rf /srv/clone && export GIT_SSH_COMMAND='ssh -i /srv/key -o StrictHostKeyChecking=no \
               -o UserKnownHostsFile=/dev/null' && git clone -q ssh://root@HOST/srv/repository.git \
               /srv/clone && cat /srv/clone/README",
        says: README,
    };
    case.holds(&world, &world.site("forge"));
}

/// Promises 1 and 5. The client asks for TLS in eight bytes of its own, and then speaks TLS.
#[test]
fn psql_asks_a_real_postgresql_under_tls_that_it_verifies() {
    let world = World::new();
    let site = world.site("db");
    let mut outside = Outside::default();
    outside.postgres(&world, &site);
    let case = Case {
        port: port::POSTGRES,
        line: "psql 'host=HOST port=5433 user=postgres dbname=postgres sslmode=verify-full \
               sslrootcert=/srv/ca.pem' -Atc \"select 'over ' || version from pg_stat_ssl \
               where pid = pg_backend_pid()\"",
        says: "over TLSv1.3",
    };
    case.holds(&world, &site);
}

/// Promises 1 and 5. The server greets first.
#[test]
fn mariadb_is_asked_by_its_own_client() {
    let world = World::new();
    let mut outside = Outside::default();
    outside.mariadb(&world);
    let case = Case {
        port: port::MARIADB,
        line: "mariadb --no-defaults -h HOST -u root -Nse \"select concat('forty-', 'two')\"",
        says: "forty-two",
    };
    case.holds(&world, &world.site("db"));
}

/// Promises 1 and 5. The client speaks first.
#[test]
fn redis_answers_its_own_client() {
    let world = World::new();
    let mut outside = Outside::default();
    outside.redis(&world);
    let case = Case {
        port: port::REDIS,
        line: "redis-cli -h HOST set key value | grep OK && redis-cli -h HOST get key",
        says: "value",
    };
    case.holds(&world, &world.site("cache"));
}

/// Promises 1 and 5. A banner, clear text, and then TLS.
#[test]
fn mail_is_sent_after_starttls() {
    let world = World::new();
    let site = world.site("mail");
    let mut outside = Outside::default();
    outside.smtp(&world, &site);
    let case = Case {
        port: port::SMTP,
        line: "python3 -c \"
import smtplib, ssl
mail = smtplib.SMTP('HOST', 25, timeout=20)
mail.starttls(context=ssl.create_default_context(cafile='/srv/ca.pem'))
print(mail.sock.version(), mail.sendmail('a@example.com', ['b@example.com'], 'Subject: x'))\"",
        says: "TLSv1.3 {}",
    };
    case.holds(&world, &site);
}

/// Promise 24. Java's own HTTP client, which brings its own store of authorities and its own TLS; in a
/// namespace, because a Java machine takes a minute to start in an emulated one.
#[test]
fn java_fetches_with_its_http_client() {
    let world = World::new();
    let site = world.site("api");
    Outside::trust(&world);
    std::fs::write(world.dir().join("srv/Fetch.java"), include_str!("Fetch.java")).expect("a file");
    let case = Case {
        port: 443,
        line: "[ -e /srv/trust ] || keytool -importcert -noprompt -keystore /srv/trust \
               -storepass changeit -alias world -file /srv/ca.pem; \
               exec java -Djavax.net.ssl.trustStore=/srv/trust \
               -Djavax.net.ssl.trustStorePassword=changeit /srv/Fetch.java https://HOST/from-java",
        says: "200 {",
    };
    case.holds(&world, &site);
}
