//! TCP as no honest kernel sends it: the verdict is on the bytes that leave, however they came.

use world::client::{self, PATIENT};
use world::segment::{Answer, ByHand, FIRST_PORT, Odd, hush};
use world::{Guest, Site, World, allow};

/// The segments of one first flight: where they belong, and what they hold.
type Segments = Vec<(usize, Vec<u8>)>;

/// A way to cut a first flight into segments.
type Cut = fn(&[u8]) -> Segments;

/// What the guest was answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    /// The far side's own handshake.
    Passed,
    /// The router's alert.
    Refused,
    /// A reset.
    Reset,
}

/// A site and another whose name is as long.
fn alike(world: &World) -> (Site, Site) {
    loop {
        let (one, two) = (world.site("one"), world.site("two"));
        if one.name.len() == two.name.len() {
            return (one, two);
        }
    }
}

/// The hello with another name in it, as long, and where the name stands.
fn renamed(hello: &[u8], from: &Site, to: &Site) -> (Vec<u8>, usize) {
    let name = from.name.as_bytes();
    let at = hello.windows(name.len()).position(|bytes| bytes == name).expect("the name is in it");
    let mut other = hello.to_vec();
    other[at..at + name.len()].copy_from_slice(to.name.as_bytes());
    (other, at)
}

/// Sends the segments from a port of their own and says what came of it.
fn verdict(guest: &Guest<'_>, n: usize, to: &Site, segments: &Segments) -> Verdict {
    let from = FIRST_PORT + u16::try_from(n).expect("few");
    let mut by_hand = ByHand::open(guest, from, (to.ip, 443), Odd::default());
    for (at, bytes) in segments {
        by_hand.put(u32::try_from(*at).expect("short"), bytes, Odd::default());
    }
    let sent = segments.iter().map(|(at, bytes)| at + bytes.len()).max().unwrap_or(0);
    read(&mut by_hand, sent)
}

fn read(by_hand: &mut ByHand<'_, '_>, sent: usize) -> Verdict {
    match by_hand.answer(u32::try_from(sent).expect("short"), PATIENT) {
        Answer::Bytes(bytes, _) if bytes[0] == 22 => Verdict::Passed,
        Answer::Bytes(bytes, _) if bytes[0] == 21 => Verdict::Refused,
        Answer::Reset => Verdict::Reset,
        other => panic!("neither let through nor refused: {other:?}"),
    }
}

fn pieces(bytes: &[u8], length: usize) -> Segments {
    let pieces = bytes.chunks(length).enumerate();
    pieces.map(|(n, piece)| (n * length, piece.to_vec())).collect()
}

/// Promise 13. Attack B10. Tiny, backwards, twice, or in the wrong half first.
#[test]
fn the_verdict_does_not_depend_on_the_order_and_size_of_segments() {
    let world = World::shared();
    let (api, other) = alike(world);
    let guest = world.guest(&allow(&[&api]));
    hush(&guest);
    let allowed = client::client_hello(&world.authority, &api.name);
    let (denied, _) = renamed(&allowed, &api, &other);
    let ways: [(&str, Cut); 6] = [
        ("whole", |hello| pieces(hello, hello.len())),
        ("a byte each", |hello| pieces(hello, 1)),
        ("backwards", |hello| pieces(hello, 7).into_iter().rev().collect()),
        ("a byte each, backwards", |hello| pieces(hello, 1).into_iter().rev().collect()),
        ("twice", |hello| [pieces(hello, 50), pieces(hello, 50)].concat()),
        ("behind what is far beyond the window", |hello| {
            [vec![(900_000_000, vec![0xff; 1000])], pieces(hello, 100)].concat()
        }),
    ];
    for (n, (how, cut)) in ways.iter().enumerate() {
        assert_eq!(verdict(&guest, 2 * n, &api, &cut(&allowed)), Verdict::Passed, "{how}");
        assert_eq!(verdict(&guest, 2 * n + 1, &other, &cut(&denied)), Verdict::Refused, "{how}");
    }
    assert_eq!(world.origin.connections(api.ip).len(), ways.len());
    assert_eq!(world.sent_to(other.ip), []);
}

/// Attack B10. Two contents for the same bytes: what was judged is what leaves, never the other.
#[test]
fn bytes_sent_twice_with_different_content_are_judged_as_they_leave() {
    let world = World::shared();
    let (api, other) = alike(world);
    let guest = world.guest(&allow(&[&api]));
    hush(&guest);
    let allowed = client::client_hello(&world.authority, &api.name);
    let (denied, name) = renamed(&allowed, &api, &other);
    let whole = |hello: &[u8]| (0, hello.to_vec());
    let tail = |hello: &[u8], at: usize| (at, hello[at..].to_vec());
    let head = |hello: &[u8], to: usize| (0, hello[..to].to_vec());
    let cases = [
        ("the first copy stays", vec![whole(&allowed), whole(&denied)], Verdict::Passed),
        ("the first copy stays", vec![whole(&denied), whole(&allowed)], Verdict::Refused),
        ("a tail too early", vec![tail(&allowed, name), whole(&denied)], Verdict::Refused),
        ("a tail too early", vec![tail(&denied, name), whole(&allowed)], Verdict::Passed),
        ("a tail, then its head", vec![tail(&allowed, name), head(&denied, name)], Verdict::Passed),
        (
            "a tail, then its head",
            vec![tail(&denied, name), head(&allowed, name)],
            Verdict::Refused,
        ),
        (
            "a tail twice, then the head",
            vec![tail(&denied, name), tail(&denied, name - 1), head(&allowed, name - 1)],
            Verdict::Refused,
        ),
    ];
    let passed = cases.iter().filter(|(_, _, meant)| *meant == Verdict::Passed).count();
    for (n, (what, segments, meant)) in cases.iter().enumerate() {
        assert_eq!(verdict(&guest, n, &api, segments), *meant, "{n}: {what}");
    }
    assert_eq!(world.origin.connections(api.ip).len(), passed);
    // Which copy of the tail counts is the kernel's choice; whichever it is, both see the same.
    for (first, second) in [(&allowed, &denied), (&denied, &allowed)] {
        let n = cases.len() + usize::from(first == &denied);
        let segments = vec![tail(first, name), tail(second, name - 1), head(first, name - 1)];
        let before = world.origin.connections(api.ip).len();
        let verdict = verdict(&guest, n, &api, &segments);
        let opened = world.origin.connections(api.ip).len() - before;
        assert_eq!(verdict == Verdict::Passed, opened == 1, "{verdict:?}");
    }
    assert_eq!(world.sent_to(other.ip), []);
    guest.reaches(&api);
}

/// Attack B10. An urgent byte is not part of the stream: neither judged nor sent on.
#[test]
fn an_urgent_byte_within_a_hello_neither_hides_its_name_nor_leaves() {
    let world = World::shared();
    let (api, other) = alike(world);
    let guest = world.guest(&allow(&[&api]));
    hush(&guest);
    let allowed = client::client_hello(&world.authority, &api.name);
    let (denied, name) = renamed(&allowed, &api, &other);
    for (n, (hello, meant)) in
        [(allowed, Verdict::Passed), (denied, Verdict::Refused)].into_iter().enumerate()
    {
        let from = FIRST_PORT + u16::try_from(n).expect("few");
        let mut by_hand = ByHand::open(&guest, from, (api.ip, 443), Odd::default());
        let at = name + 3;
        let with_urgent = [&hello[..at], b"!", &hello[at..]].concat();
        let odd = Odd { urgent: Some(u16::try_from(at + 1).expect("short")), ..Odd::default() };
        by_hand.put(0, &with_urgent, odd);
        assert_eq!(read(&mut by_hand, with_urgent.len()), meant);
    }
    assert_eq!(world.sent_to(other.ip), []);
    guest.reaches(&api);
}

/// Attack B10. Options that lie, the smallest segments a peer may ask for, acknowledgements of what
/// was never sent: the connection works or it does not, and nothing else changes.
#[test]
fn bad_options_and_the_smallest_segments_change_no_verdict() {
    let world = World::shared();
    let api = world.site("api");
    let (guest, neighbour) = (world.guest(&allow(&[&api])), world.guest(&allow(&[&api])));
    hush(&guest);
    let hello = client::client_hello(&world.authority, &api.name);
    let options: [&[u8]; 9] = [
        &[2, 4, 0, 48],
        &[2, 4, 0, 0],
        &[2, 4, 0xff, 0xff],
        &[254, 4, 1, 2],
        &[254, 0, 0, 0],
        &[2, 40, 0, 0],
        &[3, 3, 255, 1],
        &[4, 2, 4, 2, 8, 10, 0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0, 1, 1],
        &[2, 3, 5, 0],
    ];
    for (n, options) in options.iter().enumerate() {
        let from = FIRST_PORT + u16::try_from(n).expect("few");
        let odd = Odd { options, ..Odd::default() };
        let mut by_hand = ByHand::open(&guest, from, (api.ip, 443), odd);
        by_hand.put(0, &hello, Odd::default());
        let sent = u32::try_from(hello.len()).expect("short");
        let answer = by_hand.answer(sent, PATIENT);
        let Answer::Bytes(bytes, longest) = answer else { panic!("{options:?}: {answer:?}") };
        assert_eq!(bytes[0], 22, "{options:?}");
        if *options == [2, 4, 0, 48] {
            assert!(longest <= 88, "{longest}: the least that Linux sends, as asked");
        }
        // SACK of bytes that were never sent, the right edge before the left (RFC 2018).
        for edges in [[0_u32, u32::MAX], [u32::MAX, 0], [7, 7]] {
            let mut sack = vec![1, 1, 5, 10];
            sack.extend(edges.iter().flat_map(|edge| edge.to_be_bytes()));
            by_hand.put(sent, &[], Odd { options: &sack, window: Some(0), ..Odd::default() });
        }
    }
    neighbour.reaches(&api);
    guest.reaches(&api);
    assert_eq!(world.origin.connections(api.ip).len(), options.len() + 2);
}
