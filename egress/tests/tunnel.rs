//! The tunnel between two loopback connections: every byte, every end, every cut.
#![expect(
    clippy::expect_used,
    clippy::indexing_slicing,
    clippy::disallowed_methods,
    reason = "tests, which dial loopback"
)]

use std::io::ErrorKind;
use std::time::Duration;

use bytes::Bytes;
use egress::tunnel::{Ended, Pool, Why, tunnel};
use egress::{Limits, Meter};
use socket2::SockRef;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};

const SOON: Duration = Duration::from_secs(20);

async fn pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a listener");
    let address = listener.local_addr().expect("its address");
    let (near, accepted) = tokio::join!(TcpStream::connect(address), listener.accept());
    (near.expect("a connection"), accepted.expect("a connection").0)
}

/// A tunnel with its two peers.
struct World {
    client: TcpStream,
    server: TcpStream,
    meter: Meter,
    revoke: oneshot::Sender<()>,
    tunnel: JoinHandle<Ended>,
}

async fn world(first_flight: &'static [u8]) -> World {
    world_with(first_flight, Limits::default(), Pool::new(8)).await
}

async fn world_with(first_flight: &'static [u8], limits: Limits, pool: Pool) -> World {
    let ((client, guest), (far, server)) = (pair().await, pair().await);
    let (meter, (revoke, revoked)) = (Meter::new(), oneshot::channel::<()>());
    let counted = meter.clone();
    let tunnel = tokio::spawn(async move {
        let first = Bytes::from_static(first_flight);
        let revoked = async {
            if revoked.await.is_err() {
                std::future::pending().await
            }
        };
        tunnel(guest, far, first, &limits, &counted, &pool, revoked).await
    });
    World { client, server, meter, revoke, tunnel }
}

async fn ended(tunnel: JoinHandle<Ended>) -> Ended {
    timeout(SOON, tunnel).await.expect("an end in time").expect("no panic")
}

/// A small generator (xorshift): reproducible bytes and sizes.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn bytes(&mut self, count: usize) -> Vec<u8> {
        (0..count.div_ceil(8)).flat_map(|_| self.next().to_le_bytes()).take(count).collect()
    }

    fn below(&mut self, bound: usize) -> usize {
        usize::try_from(self.next() % bound as u64).expect("a small number")
    }
}

/// Sends `bytes` in writes of random sizes and then the end.
async fn send(stream: &mut (impl AsyncWriteExt + Unpin), mut bytes: &[u8], seed: u64) {
    let mut random = Random(seed);
    while !bytes.is_empty() {
        let size = [1, 100, 1460, 70_000, 300_000][random.below(5)];
        let (part, rest) = bytes.split_at((1 + random.below(size)).min(bytes.len()));
        stream.write_all(part).await.expect("a write");
        bytes = rest;
        if random.below(8) == 0 {
            tokio::task::yield_now().await;
        }
    }
    stream.shutdown().await.expect("a half-close");
}

async fn receive(stream: &mut (impl AsyncReadExt + Unpin)) -> Vec<u8> {
    let mut bytes = Vec::new();
    timeout(SOON, stream.read_to_end(&mut bytes)).await.expect("an end in time").expect("a read");
    bytes
}

/// What a read gives once everything before the end has been read.
async fn end_of(stream: &mut TcpStream) -> Result<(), ErrorKind> {
    let mut sink = vec![0; 65536];
    loop {
        match timeout(SOON, stream.read(&mut sink)).await.expect("an end in time") {
            Ok(0) => return Ok(()),
            Ok(_) => {}
            Err(error) => return Err(error.kind()),
        }
    }
}

fn reset(stream: TcpStream) {
    SockRef::from(&stream).set_linger(Some(Duration::ZERO)).expect("linger");
}

/// Sends until the tunnel takes no more: its far peer is not reading.
async fn fill(stream: &mut TcpStream) -> usize {
    let mut sent = 0;
    while let Ok(written) = timeout(Duration::from_millis(300), stream.write(&[b'x'; 65536])).await
    {
        sent += written.expect("a write");
    }
    sent
}

/// Promise 14.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_byte_arrives_in_order_both_ways() {
    let sizes = [0, 1, 65_535, 65_536, 65_537, 1 << 20, (1 << 20) + 1, 5_000_000];
    for (seed, (out, back)) in
        (1..).zip(sizes.iter().flat_map(|&out| [0, 65_537, 3_000_000].map(|back| (out, back))))
    {
        let pool = Pool::new(if seed % 3 == 0 { 0 } else { 1 });
        let world = world_with(b"hello", Limits::default(), pool).await;
        let (mut client, mut server) = (world.client, world.server);
        let (there, here) = (Random(seed).bytes(out), Random(seed + 99).bytes(back));
        let (mut client_read, mut client_write) = client.split();
        let (mut server_read, mut server_write) = server.split();
        let ((), (), got_there, got_here) = tokio::join!(
            send(&mut client_write, &there, seed),
            send(&mut server_write, &here, seed + 7),
            receive(&mut server_read),
            receive(&mut client_read),
        );
        assert!(got_there[..5] == *b"hello" && got_there[5..] == there, "{out} bytes out");
        assert!(got_here == here, "{back} bytes back");
        let (bytes_out, bytes_in) = (5 + out as u64, back as u64);
        assert_eq!(ended(world.tunnel).await, Ended { bytes_out, bytes_in, why: Why::Closed });
        assert_eq!((world.meter.bytes_out(), world.meter.bytes_in()), (bytes_out, bytes_in));
    }
}

/// Promise 14. Attack P31.
#[tokio::test]
async fn a_half_close_passes_and_the_other_direction_goes_on() {
    for (guest_first, size) in [(true, 10), (true, 3_000_000), (false, 10), (false, 3_000_000)] {
        let world = world(b"").await;
        let (mut first, mut second) = (world.client, world.server);
        if !guest_first {
            std::mem::swap(&mut first, &mut second);
        }
        let question = Random(3).bytes(size);
        let ((), got) = tokio::join!(send(&mut first, &question, 1), receive(&mut second));
        assert!(got == question);
        assert!(!world.tunnel.is_finished());
        for part in [b"one", b"two"] {
            second.write_all(part).await.expect("a write");
            let mut got = [0; 3];
            timeout(SOON, first.read_exact(&mut got)).await.expect("in time").expect("a read");
            assert_eq!(&got, part);
        }
        let answer = Random(4).bytes(size);
        let ((), got) = tokio::join!(send(&mut second, &answer, 2), receive(&mut first));
        assert!(got == answer);
        assert_eq!(ended(world.tunnel).await.why, Why::Closed);
    }
}

#[tokio::test]
async fn a_reset_passes_as_a_reset() {
    // Before and after the direction is spliced, and after its own half-close.
    for (size, half_closed) in [(10, false), (1_500_000, false), (10, true)] {
        for guest_resets in [true, false] {
            let world = world(b"").await;
            let (mut resets, mut stays) = (world.client, world.server);
            if !guest_resets {
                std::mem::swap(&mut resets, &mut stays);
            }
            let sent = Random(5).bytes(size);
            let mut got = vec![0; size];
            let (wrote, read) = tokio::join!(resets.write_all(&sent), stays.read_exact(&mut got));
            assert!(wrote.is_ok() && read.is_ok() && got == sent);
            if half_closed {
                resets.shutdown().await.expect("a half-close");
                assert_eq!(end_of(&mut stays).await, Ok(()));
            }
            reset(resets);
            let why = if guest_resets { Why::GuestReset } else { Why::FarReset };
            assert_eq!(ended(world.tunnel).await.why, why);
            if !half_closed {
                assert_eq!(end_of(&mut stays).await, Err(ErrorKind::ConnectionReset));
            }
            let dead = async { while stays.write_all(b"x").await.is_ok() {} };
            timeout(SOON, dead).await.expect("an error in time");
        }
    }
}

#[tokio::test]
async fn what_was_sent_before_a_reset_still_arrives() {
    // A server that answers early and closes with the request unread.
    let mut world = world(b"").await;
    world.client.write_all(b"request").await.expect("a write");
    timeout(SOON, world.server.peek(&mut [0])).await.expect("in time").expect("the request");
    world.server.write_all(&[b'y'; 50_000]).await.expect("an answer");
    drop(world.server);
    let mut got = vec![0; 50_000];
    timeout(SOON, world.client.read_exact(&mut got)).await.expect("in time").expect("the answer");
    assert_eq!(ended(world.tunnel).await.why, Why::FarReset);
    assert_eq!(end_of(&mut world.client).await, Err(ErrorKind::ConnectionReset));
}

#[tokio::test]
async fn a_peer_that_stops_reading_stops_the_sender_and_loses_nothing() {
    let mut world = world(b"").await;
    let sent = fill(&mut world.client).await;
    let taken = world.meter.bytes_out();
    tokio::time::sleep(Duration::from_millis(50)).await;
    assert_eq!(world.meter.bytes_out(), taken, "the server's own buffers are full");
    // The other direction is not held up.
    world.server.write_all(b"back").await.expect("a write");
    let mut got = [0; 4];
    timeout(SOON, world.client.read_exact(&mut got)).await.expect("in time").expect("a read");
    world.client.shutdown().await.expect("a half-close");
    assert_eq!(receive(&mut world.server).await.len(), sent);
    drop(world.server);
    assert_eq!(ended(world.tunnel).await.why, Why::Closed);
}

#[tokio::test]
async fn a_revoked_tunnel_is_reset_on_both_sides_at_once() {
    for blocked in [false, true] {
        let mut world = world(b"").await;
        let sent = if blocked { fill(&mut world.client).await } else { 0 };
        world.revoke.send(()).expect("a tunnel");
        let ended = ended(world.tunnel).await;
        assert_eq!(ended.why, Why::Revoked);
        assert!(!blocked || ended.bytes_out < sent as u64, "some of it was still queued");
        for peer in [&mut world.client, &mut world.server] {
            assert_eq!(end_of(peer).await, Err(ErrorKind::ConnectionReset));
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_tunnel_is_idle_when_no_byte_came_either_way_for_its_limit() {
    let mut world = world(b"").await;
    let limit = Limits::default().idle;
    for from_guest in [true, false] {
        tokio::time::sleep(limit * 3 / 4).await;
        let (from, to) = match from_guest {
            true => (&mut world.client, &mut world.server),
            false => (&mut world.server, &mut world.client),
        };
        from.write_all(b"x").await.expect("a write");
        assert_eq!(to.read_u8().await.expect("a read"), b'x');
    }
    let last = Instant::now();
    assert_eq!(world.tunnel.await.expect("no panic").why, Why::Idle);
    let waited = last.elapsed();
    assert!(waited.abs_diff(limit) < Duration::from_secs(1), "{waited:?}");
    assert_eq!(end_of(&mut world.client).await, Err(ErrorKind::ConnectionReset));
}

#[tokio::test(start_paused = true)]
async fn a_half_closed_tunnel_waits_less() {
    let mut world = world(b"").await;
    world.client.shutdown().await.expect("a half-close");
    assert_eq!(world.server.read(&mut [0]).await.expect("an end"), 0);
    let last = Instant::now();
    assert_eq!(world.tunnel.await.expect("no panic").why, Why::Idle);
    let (waited, limit) = (last.elapsed(), Limits::default().half_closed);
    assert!(waited.abs_diff(limit) < Duration::from_secs(1), "{waited:?}");
}

#[tokio::test]
async fn a_tunnel_that_waits_fits_in_two_kib() {
    let ((_client, guest), (far, _server)) = (pair().await, pair().await);
    let (limits, meter, pool) = (Limits::default(), Meter::new(), Pool::new(1));
    let never = std::future::pending();
    let size = size_of_val(&tunnel(guest, far, Bytes::new(), &limits, &meter, &pool, never));
    assert!(size <= 2048, "{size} bytes");
}
