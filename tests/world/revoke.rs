//! Revocation at size: one write over a thousand open flows of every kind, in several sandboxes. What
//! is cut is exactly what is denied, and after the answer not one more byte of it reaches the far side.

use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use hickory_proto::rr::RecordType;
use policy::net::GATEWAY_IP;
use rustls::ClientConnection;
use serde_json::json;
use world::client::{self, End, PATIENT};
use world::origin::{self, port};
use world::{Guest, Site, World};

/// How many flows of each kind a sandbox has open to each of its two sites.
const EACH: [(Kind, usize); 6] = [
    (Kind::Splice, 25),
    (Kind::Uploading, 20),
    (Kind::Idle, 20),
    (Kind::Pinned, 25),
    (Kind::ServerFirst, 20),
    (Kind::Address, 15),
];
const SANDBOXES: usize = 4;
const BODY: &[u8] = &[7; 4096];

/// The kinds of flow that a policy is asked about.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Kind {
    /// TLS, unopened, with requests inside.
    Splice,
    /// HTTP in the middle of a request's body.
    Uploading,
    /// HTTP between two requests.
    Idle,
    /// Bytes to a port that a rule names, by the name the guest was told.
    Pinned,
    /// The same, where the server speaks first.
    ServerFirst,
    /// Bytes to an address that a rule names.
    Address,
}

/// Two names and two addresses: one of each stays allowed.
struct Sites {
    kept: Site,
    cut: Site,
    kept_address: Site,
    cut_address: Site,
}

/// Ends what goes on beside a test when the test does, and when it fails.
pub(crate) struct Busy<'a>(pub(crate) &'a AtomicBool);

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Relaxed);
    }
}

/// An open flow.
pub(crate) struct Open {
    pub(crate) kind: Kind,
    host: String,
    stream: TcpStream,
    tls: Option<ClientConnection>,
}

impl Sites {
    fn new(world: &World) -> Self {
        let [kept, cut, kept_address, cut_address] =
            ["kept", "cut", "kept-ip", "cut-ip"].map(|label| world.site(label));
        Self { kept, cut, kept_address, cut_address }
    }

    fn policy(&self) -> String {
        let Self { kept, cut, kept_address, cut_address } = self;
        let (named, by_port) = (world::allow(&[kept, cut]), [port::ECHO, port::SERVER_FIRST]);
        format!(
            "{named}[[rule]]\nallow = [{:?}, {:?}]\nports = {by_port:?}\n\
             [[rule]]\nallow = [\"{}\", \"{}\"]\nports = [{}]\n",
            kept.name,
            cut.name,
            kept_address.ip,
            cut_address.ip,
            port::ECHO
        )
    }

    /// Where flows of this kind go, by name or by address.
    fn of(&self, kind: Kind, kept: bool) -> &Site {
        match (kind, kept) {
            (Kind::Address, true) => &self.kept_address,
            (Kind::Address, false) => &self.cut_address,
            (_, true) => &self.kept,
            (_, false) => &self.cut,
        }
    }

    fn denied(&self) -> [String; 2] {
        [self.cut.name.clone(), self.cut_address.ip.to_string()]
    }
}

impl Open {
    /// Opens a flow and brings it to where its kind is at rest. Called inside the guest.
    pub(crate) fn new(world: &World, kind: Kind, site: &Site) -> Self {
        let number = match kind {
            Kind::Splice => port::HTTPS,
            Kind::Uploading | Kind::Idle => port::HTTP,
            Kind::Pinned | Kind::Address => port::ECHO,
            Kind::ServerFirst => port::SERVER_FIRST,
        };
        let stream = client::connect(site.at(number), PATIENT).expect("connect");
        let tls = (kind == Kind::Splice).then(|| client::tls(&world.authority, &site.name));
        let mut open = Self { kind, host: site.name.clone(), stream, tls };
        if kind == Kind::ServerFirst {
            let mut greeting = [0; origin::GREETING.len()];
            open.stream.read_exact(&mut greeting).expect("a greeting");
        }
        if kind == Kind::Uploading {
            let head = format!(
                "POST /sum HTTP/1.1\r\nHost: {}\r\nContent-Length: {}\r\n\r\n",
                open.host,
                2 * BODY.len()
            );
            open.stream.write_all(&[head.as_bytes(), BODY].concat()).expect("half of a request");
        } else {
            open.goes_on().expect("it works before the write");
        }
        open
    }

    /// One more exchange on it, every byte checked.
    pub(crate) fn goes_on(&mut self) -> std::io::Result<()> {
        match self.kind {
            Kind::Splice | Kind::Idle => {
                let ask = format!("GET /bytes/3000 HTTP/1.1\r\nHost: {}\r\n\r\n", self.host);
                self.ask(ask.as_bytes(), &origin::pattern(3000))
            }
            Kind::Uploading => {
                let sum = origin::sum(&[BODY, BODY].concat());
                self.ask(BODY, sum.as_bytes())
            }
            Kind::Pinned | Kind::ServerFirst | Kind::Address => {
                self.stream.write_all(BODY)?;
                let mut reply = vec![0; BODY.len()];
                self.stream.read_exact(&mut reply)?;
                if reply == BODY { Ok(()) } else { Err(ErrorKind::InvalidData.into()) }
            }
        }
    }

    /// Sends the beginning of a request.
    pub(crate) fn say(&mut self, words: &[u8]) -> std::io::Result<()> {
        match &mut self.tls {
            Some(tls) => rustls::Stream::new(tls, &mut self.stream).write_all(words),
            None => self.stream.write_all(words),
        }
    }

    /// Sends a request, or what was missing of it, and expects this body in return.
    pub(crate) fn ask(&mut self, request: &[u8], body: &[u8]) -> std::io::Result<()> {
        let mut reply = Vec::new();
        match &mut self.tls {
            Some(tls) => exchange(rustls::Stream::new(tls, &mut self.stream), request, &mut reply)?,
            None => exchange(&mut self.stream, request, &mut reply)?,
        }
        if reply.starts_with(b"HTTP/1.1 200") && reply.ends_with(body) {
            return Ok(());
        }
        Err(ErrorKind::InvalidData.into())
    }

    /// Whether the guest finds it reset, without any byte that was not there before.
    fn is_reset(&mut self) -> bool {
        let mut rest = Vec::new();
        client::read_to_end(&mut self.stream, &mut rest, PATIENT) == End::Reset
    }
}

/// Sends a request and reads one response, whose length its head says.
fn exchange(
    mut stream: impl Read + Write,
    request: &[u8],
    reply: &mut Vec<u8>,
) -> std::io::Result<()> {
    stream.write_all(request)?;
    let mut buffer = vec![0; 1 << 14];
    loop {
        let length = stream.read(&mut buffer)?;
        if length == 0 {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        reply.extend_from_slice(&buffer[..length]);
        let text = String::from_utf8_lossy(reply).to_ascii_lowercase();
        let Some((head, _)) = text.split_once("\r\n\r\n") else { continue };
        let length = head.lines().find_map(|line| line.strip_prefix("content-length: "));
        let length: usize = length.and_then(|n| n.parse().ok()).unwrap_or_default();
        if reply.len() >= head.len() + 4 + length {
            return Ok(());
        }
    }
}

/// Opens all flows of one sandbox: those to what stays allowed, and those to what will be denied.
fn open_all(world: &World, guest: &Guest<'_>, sites: &Sites) -> [Vec<Open>; 2] {
    guest.run(|| {
        for site in [&sites.kept, &sites.cut] {
            let query = client::query(&site.name, RecordType::A);
            client::ask_udp((GATEWAY_IP, 53).into(), &query).expect("an answer");
        }
        [true, false].map(|kept| {
            let all = EACH.iter().flat_map(|(kind, count)| std::iter::repeat_n(*kind, *count));
            all.map(|kind| Open::new(world, kind, sites.of(kind, kept))).collect()
        })
    })
}

/// Writes on flows that are to be cut until all of them are.
fn shout(streams: Vec<TcpStream>) {
    let deadline = Instant::now() + PATIENT * 3;
    let mut open = streams;
    open.iter().for_each(|stream| stream.set_nonblocking(true).expect("non-blocking"));
    while !open.is_empty() && Instant::now() < deadline {
        open.retain_mut(|stream| {
            // What comes back is taken first, so that a reset is found by the write.
            let mut waste = [0; 1 << 14];
            let ended = [stream.read(&mut waste), stream.write(BODY)]
                .into_iter()
                .find_map(|done| done.err().filter(|e| e.kind() != ErrorKind::WouldBlock));
            let by_reset = |e: &std::io::Error| {
                matches!(e.kind(), ErrorKind::ConnectionReset | ErrorKind::BrokenPipe)
            };
            assert!(ended.as_ref().is_none_or(by_reset), "{ended:?}");
            ended.is_none()
        });
        std::thread::yield_now();
    }
    assert!(open.is_empty(), "{} still open", open.len());
}

/// Promise 18. Attacks F07, P32. In one write for all sandboxes of a tenant, while flows that stay
/// and flows that go are in full flight.
#[test]
fn a_write_over_a_thousand_flows_cuts_the_denied_ones_and_nothing_of_them_leaves_after_it() {
    let world = World::new();
    let tenant = world.fresh_name();
    let sites: Vec<Sites> = (0..SANDBOXES).map(|_| Sites::new(&world)).collect();
    let guests: Vec<Guest<'_>> =
        sites.iter().map(|sites| world.guest_of(&tenant, &sites.policy())).collect();
    let mut opened: Vec<[Vec<Open>; 2]> = std::thread::scope(|scope| {
        let opening: Vec<_> = guests
            .iter()
            .zip(&sites)
            .map(|(guest, sites)| scope.spawn(|| open_all(&world, guest, sites)))
            .collect();
        opening.into_iter().map(|one| one.join().expect("opened")).collect()
    });
    let half = SANDBOXES * EACH.iter().map(|(_, count)| count).sum::<usize>();
    let names: Vec<String> = sites.iter().flat_map(Sites::denied).collect();
    let deny = format!("default = \"allow\"\n[[rule]]\ndeny = {names:?}\n");
    let toml = ["-H", "content-type: application/toml", "--data-binary", &deny];

    // Those that write all the time find out by themselves that they are cut.
    let loud: Vec<Vec<TcpStream>> = opened
        .iter_mut()
        .map(|[_, cut]| {
            let loud = cut.extract_if(.., |o| matches!(o.kind, Kind::Pinned | Kind::Address));
            loud.map(|open| open.stream).collect()
        })
        .collect();
    let busy = AtomicBool::new(true);
    let (answer, mark) = std::thread::scope(|scope| {
        let _busy = Busy(&busy);
        for ([kept, _], loud) in opened.iter_mut().zip(loud) {
            scope.spawn(|| shout(loud));
            scope.spawn(|| {
                while busy.load(Ordering::Relaxed) {
                    for open in kept.iter_mut().filter(|open| open.kind != Kind::Uploading) {
                        open.goes_on().expect("a flow that stays goes on meanwhile");
                    }
                }
            });
        }
        let answer = world.api("PUT", &format!("/v1/tenants/{tenant}/policy"), &toml);
        let mark = world.mark();
        (answer, mark)
    });
    assert_eq!(answer.status, 200, "{}", answer.text);
    assert_eq!(answer.json["sandboxes"], json!(SANDBOXES), "{}", answer.text);
    assert_eq!(answer.json["checked"], json!(2 * half), "{}", answer.text);
    assert_eq!(answer.json["cut"], json!(half), "{}", answer.text);
    assert_eq!(answer.json["closing"], json!(0), "{}", answer.text);

    for [kept, cut] in &mut opened {
        for open in cut {
            assert!(open.is_reset(), "{:?} to {}", open.kind, open.host);
        }
        for open in kept {
            open.goes_on().unwrap_or_else(|e| panic!("{:?} to {}: {e}", open.kind, open.host));
        }
    }
    let far = |kept: bool| -> Vec<Ipv4Addr> {
        let both =
            |sites: &Sites| [Kind::Splice, Kind::Address].map(|kind| sites.of(kind, kept).ip);
        sites.iter().flat_map(both).collect()
    };
    let carries = |to: &[Ipv4Addr]| {
        world.sent_since(mark, |seen| seen.payload > 0 && to.iter().any(|ip| seen.is_to(*ip)))
    };
    assert_eq!(carries(&far(false)), []);
    let denied = far(false);
    let mut ended: Vec<_> = world
        .sent_until(mark, |seen| seen.reset && denied.iter().any(|ip| seen.is_to(*ip)))
        .iter()
        .filter_map(|seen| Some((seen.addresses?.1, seen.ports?)))
        .collect();
    ended.sort_unstable();
    ended.dedup();
    assert_eq!(ended.len(), half, "every one of them was over before the answer");
    assert!(!carries(&far(true)).is_empty(), "the control: what stays is seen on the same wire");
    let revision = answer.json["revision"].to_string();
    for guest in &guests {
        let closed = guest.event(&[("code", "policy-changed"), ("outcome", "closed")]);
        assert_eq!(closed["revision"].to_string(), revision, "{closed}");
        assert_eq!(closed["layer"], "tenant", "{closed}");
    }
    let again = world.api("PUT", &format!("/v1/tenants/{tenant}/policy"), &toml);
    assert_eq!((&again.json["checked"], &again.json["cut"]), (&json!(half), &json!(0)));
    assert_eq!(again.json["revision"], answer.json["revision"], "the same document moves nothing");
}

/// Promise 18. A question over TCP is judged when it is asked, on a stream that was open before.
#[test]
fn a_stream_of_questions_goes_on_under_the_new_policy() {
    let world = World::shared();
    let site = world.site("asked");
    let guest = world.guest(&world::allow(&[&site]));
    let query = client::query(&site.name, RecordType::A).to_vec().expect("a query");
    let query = [&u16::try_from(query.len()).expect("short").to_be_bytes()[..], &query].concat();
    let ask = |stream: &mut TcpStream| {
        stream.write_all(&query).expect("asked");
        let mut length = [0; 2];
        stream.read_exact(&mut length).expect("a length");
        let mut reply = vec![0; usize::from(u16::from_be_bytes(length))];
        stream.read_exact(&mut reply).expect("a reply");
        reply[3] & 0xf
    };
    let resolver = SocketAddr::from((GATEWAY_IP, 53));
    let mut stream = guest.run(|| client::connect(resolver, PATIENT).expect("connect"));
    assert_eq!(ask(&mut stream), 0);
    let asked = world.names.asked(&site.name).len();
    assert_eq!(guest.set_policy("").status, 200);
    assert_eq!(ask(&mut stream), 3, "NXDOMAIN");
    assert_eq!(world.names.asked(&site.name).len(), asked);
}

/// Promise 18. Writes have one order, and the last one is in force everywhere.
#[test]
fn of_writes_at_the_same_time_the_last_revision_is_in_force() {
    let world = World::shared();
    let sites: Vec<Site> = (0..8).map(|_| world.site("race")).collect();
    let guest = world.guest("");
    for _ in 0..3 {
        let answers: Vec<_> = std::thread::scope(|scope| {
            let writing: Vec<_> = sites
                .iter()
                .map(|site| {
                    let guest = &guest;
                    scope.spawn(move || (site, guest.set_policy(&world::allow(&[site]))))
                })
                .collect();
            writing.into_iter().map(|one| one.join().expect("written")).collect()
        });
        let revision = |(_, answer): &(&Site, world::daemon::Answer)| {
            assert_eq!(answer.status, 200, "{}", answer.text);
            answer.json["revision"].as_u64().expect("a revision")
        };
        let mut revisions: Vec<u64> = answers.iter().map(revision).collect();
        let last = *revisions.iter().max().expect("eight");
        revisions.sort_unstable();
        revisions.dedup();
        assert_eq!(revisions.len(), sites.len(), "each write has its own revision");
        for answer in &answers {
            let site = answer.0;
            let hello = client::client_hello(&world.authority, &site.name);
            let reply = guest.run(|| {
                client::exchange_until(site.at(443), &[&hello], PATIENT, client::has_handshake)
            });
            let passes = revision(answer) == last;
            assert_eq!(client::has_handshake(&reply.bytes), passes, "{reply:?}");
            assert_eq!(reply.alert().is_none(), passes, "{reply:?}");
        }
        let path = format!("/v1/sandboxes/{}", guest.name);
        assert_eq!(world.api("GET", &path, &[]).json["revision"], json!(last));
    }
}

/// Promise 19. A policy that cannot be written down is not put in force.
#[test]
fn a_write_that_the_journal_refuses_changes_nothing_and_is_told() {
    let world = World::new();
    let (site, other) = (world.site("kept"), world.site("new"));
    let guest = world.guest(&world::allow(&[&site]));
    let mut open = guest.run(|| {
        let query = client::query(&site.name, RecordType::A);
        client::ask_udp((GATEWAY_IP, 53).into(), &query).expect("an answer");
        Open::new(&world, Kind::Splice, &site)
    });
    let before = guest.set_policy(&world::allow(&[&site]));
    let journal = rusqlite::Connection::open(world.dir().join("state/postern.db")).expect("open");
    journal.busy_timeout(Duration::from_secs(10)).expect("a timeout");
    journal
        .execute_batch(
            "CREATE TRIGGER full BEFORE INSERT ON policy \
             BEGIN SELECT RAISE(ABORT, 'database or disk is full'); END",
        )
        .expect("a journal that refuses");
    for policy in ["".to_owned(), world::allow(&[&other])] {
        let refused = guest.set_policy(&policy);
        assert_eq!(refused.status, 500, "{}", refused.text);
        open.goes_on().expect("the old policy is whole");
    }
    let shown = world.api("GET", &format!("/v1/sandboxes/{}", guest.name), &[]);
    assert_eq!(
        shown.json["revision"], before.json["revision"],
        "a refused write moves no revision"
    );
    let hello = client::client_hello(&world.authority, &other.name);
    let reply = guest.run(|| client::exchange(other.at(443), &[&hello], PATIENT));
    assert!(reply.alert().is_some(), "{reply:?}");
    assert_eq!(world.sent_to(other.ip), []);
    journal.execute_batch("DROP TRIGGER full").expect("room again");
    let after = guest.set_policy("");
    assert_eq!((after.status, &after.json["cut"]), (200, &json!(1)), "{}", after.text);
    let moved =
        |answer: &world::daemon::Answer| answer.json["revision"].as_u64().expect("a number");
    assert!(moved(&after) > moved(&before));
    assert!(open.is_reset());
}
