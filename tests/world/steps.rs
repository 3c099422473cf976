//! What an exchange on an open connection costs: no timer of TCP. Neither side of the router keeps a
//! small segment until the one before is acknowledged, which whoever got it may delay by 40 ms.

use std::io;
use std::time::{Duration, Instant};

use hickory_proto::rr::RecordType;
use policy::net::GATEWAY_IP;
use world::client;
use world::origin::{self, PAUSE, port};
use world::{Site, World, allow};

use crate::revoke::{Kind, Open};

const EXCHANGES: usize = 60;
const HALF: usize = EXCHANGES / 2;
/// The least that Linux delays an acknowledgement by is 40 ms, and the pieces have pauses between
/// them.
const LATE: Duration = Duration::from_millis(30);
/// As many may be late because the machine is busy.
const STRAYS: usize = EXCHANGES / 10;
/// After as much, a splice has gone from copying to a narrow pipe and to a wide one.
const MUCH: usize = 1_200_000;

/// A request whose body comes a moment after its head, a response in pieces, and one of each whole;
/// how long the last of these pieces took.
fn exchange(open: &mut Open, site: &Site, turn: usize) -> io::Result<Duration> {
    let get = |path: &str| format!("GET {path} HTTP/1.1\r\nHost: {}\r\n\r\n", site.name);
    let mut start = Instant::now();
    match (open.kind, turn) {
        (Kind::Pinned, _) => open.goes_on()?,
        (_, HALF) => {
            open.ask(get(&format!("/bytes/{MUCH}")).as_bytes(), &origin::pattern(MUCH))?;
            start = Instant::now();
        }
        (_, turn) if turn % 3 == 0 => {
            let body = [b'x'; 1024];
            let head = format!(
                "POST /sum HTTP/1.1\r\nHost: {}\r\nContent-Length: {}\r\n\r\n",
                site.name,
                body.len()
            );
            open.say(head.as_bytes())?;
            std::thread::sleep(PAUSE);
            start = Instant::now();
            open.ask(&body, origin::sum(&body).as_bytes())?;
        }
        (_, turn) if turn % 3 == 1 => open.ask(get("/pieces").as_bytes(), &origin::pieces())?,
        _ => open.goes_on()?,
    }
    Ok(start.elapsed())
}

/// How long each exchange takes, in order of length.
fn times(open: &mut Open, site: &Site) -> Vec<Duration> {
    let each = (0..EXCHANGES).map(|turn| exchange(open, site, turn).expect("an exchange"));
    let mut times: Vec<Duration> = each.collect();
    times.sort_unstable();
    times
}

/// Attack P52. In clear HTTP, by server name and by the name that was told for the address.
#[test]
fn an_exchange_on_an_open_connection_waits_for_no_timer() {
    let world = World::shared();
    let site = world.site("echo");
    let pinned = format!("[[rule]]\nallow = [{:?}]\nports = [{}]\n", site.name, port::ECHO);
    let guest = world.guest(&(allow(&[&site]) + &pinned));
    let query = client::query(&site.name, RecordType::A);
    guest.run(|| client::ask_udp((GATEWAY_IP, 53).into(), &query)).expect("an answer");
    let mut waits = Vec::new();
    for kind in [Kind::Idle, Kind::Splice, Kind::Pinned] {
        let mut direct = world.host.run(|| Open::new(world, kind, &site));
        let mut routed = guest.run(|| Open::new(world, kind, &site));
        let mut rounds = Vec::new();
        while rounds.len() < 3 {
            let (direct, routed) = (times(&mut direct, &site), times(&mut routed, &site));
            let late = routed.iter().filter(|took| **took >= LATE).count();
            let medians = [direct, routed].map(|times| times[times.len() / 2]);
            if late <= STRAYS && medians[1] < medians[0] + LATE / 2 {
                break;
            }
            rounds.push((late, medians));
        }
        if rounds.len() == 3 {
            waits.push((kind, rounds));
        }
    }
    assert!(waits.is_empty(), "late, and the medians without and with the router: {waits:?}");
}
