//! Somebody sets the clock on the wall, an hour forward and back, while everything goes on. Records are
//! dated by it, and nothing is decided by it.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use hickory_proto::rr::RecordType;
use policy::net::GATEWAY_IP;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use world::client::{self, ACCESS_DENIED, PATIENT};
use world::origin::port;
use world::{World, allow};

/// Promise 23. What is open stays open, what was told by DNS stands and is not asked again, what is denied
/// stays denied, and the records are in the order in which they were made.
#[test]
fn a_wall_clock_that_is_set_decides_nothing_and_records_keep_their_order() {
    const HOUR: i64 = 3600;
    let world = World::new();
    let (api, raw, sink) = (world.site("api"), world.site("raw"), world.attacker());
    let rule = format!("[[rule]]\nallow = [\"{}\"]\nports = [{}]\n", raw.name, port::ECHO);
    let guest = world.guest(&format!("{}{rule}", allow(&[&api])));
    let query = client::query(&raw.name, RecordType::A);
    let told = guest.run(|| client::ask_udp((GATEWAY_IP, 53).into(), &query)).expect("an answer");
    assert_eq!(client::addresses(&told), [raw.ip]);
    let connect = || guest.run(|| client::connect(raw.at(port::ECHO), PATIENT).expect("connect"));
    let echoes = |stream: &mut TcpStream| {
        stream.set_read_timeout(Some(PATIENT)).expect("a limit");
        stream.write_all(b"x\r\n").expect("sent");
        stream.read_exact(&mut [0; 3]).expect("an echo");
    };
    let mut open = connect();
    echoes(&mut open);
    guest.reaches(&api);
    let asked = || [&api, &raw].map(|site| world.names.asked(&site.name).len());
    let before = asked();

    let turns = [0, HOUR, -HOUR, HOUR, 0];
    let name = |turn: usize| format!("turn-{turn}.{}", sink.name);
    for (turn, ahead) in turns.into_iter().enumerate() {
        world.daemon().set_clock(ahead);
        echoes(&mut open);
        echoes(&mut connect());
        guest.reaches(&api);
        assert_eq!(asked(), before, "{ahead}: it is known");
        let hello = client::client_hello(&world.authority, &name(turn));
        let reply = guest.run(|| client::exchange(sink.at(443), &[&hello], PATIENT));
        assert_eq!(reply.alert(), Some(ACCESS_DENIED), "{ahead}: {reply:?}");
        guest.event(&[("outcome", "deny"), ("name", &name(turn))]);
    }
    assert_eq!(world.sent_to(sink.ip), []);

    let denied: Vec<(String, OffsetDateTime)> = world
        .events(&guest.name)
        .iter()
        .filter(|record| record["kind"] == "connection" && record["outcome"] == "deny")
        .map(|record| {
            let text = |key: &str| record[key].as_str().expect("text").to_owned();
            (text("name"), OffsetDateTime::parse(&text("time"), &Rfc3339).expect("a time"))
        })
        .collect();
    let names: Vec<&str> = denied.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, (0..turns.len()).map(name).collect::<Vec<_>>());
    for (pair, set) in denied.windows(2).zip(turns.windows(2)) {
        let went = (pair[1].1 - pair[0].1) - time::Duration::seconds(set[1] - set[0]);
        assert!(went.abs() < Duration::from_secs(600), "control: the clock was set: {denied:?}");
    }
}
