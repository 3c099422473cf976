//! What a tunnel holds and burns. One test, alone in its process: descriptors and CPU time are counted
//! for the whole process.
#![expect(clippy::expect_used, clippy::disallowed_methods, reason = "tests, which dial loopback")]

use std::time::Duration;

use bytes::Bytes;
use egress::tunnel::{Ended, Pool, Why, tunnel};
use egress::{Limits, Meter};
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::time::TimeValLike;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinHandle;
use tokio::time::timeout;

const SOON: Duration = Duration::from_secs(20);

async fn pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a listener");
    let address = listener.local_addr().expect("its address");
    let (near, accepted) = tokio::join!(TcpStream::connect(address), listener.accept());
    (near.expect("a connection"), accepted.expect("a connection").0)
}

async fn start(pool: &Pool) -> (TcpStream, TcpStream, JoinHandle<Ended>) {
    let ((client, guest), (far, server)) = (pair().await, pair().await);
    let pool = pool.clone();
    let tunnel = tokio::spawn(async move {
        let (limits, meter) = (Limits::default(), Meter::new());
        let never = std::future::pending();
        tunnel(guest, far, Bytes::new(), &limits, &meter, &pool, never).await
    });
    (client, server, tunnel)
}

async fn carry(client: &mut TcpStream, server: &mut TcpStream, size: usize) {
    let (bytes, mut got) = (vec![7; size], vec![0; size]);
    let (wrote, read) = tokio::join!(client.write_all(&bytes), server.read_exact(&mut got));
    assert!(wrote.is_ok() && read.is_ok() && got == bytes);
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").expect("procfs").count()
}

fn cpu() -> Duration {
    let usage = getrusage(UsageWho::RUSAGE_SELF).expect("usage");
    let micros = (usage.user_time() + usage.system_time()).num_microseconds();
    Duration::from_micros(micros.unsigned_abs())
}

#[tokio::test]
async fn tunnels_hold_no_pipe_when_quiet_and_no_descriptor_when_over_and_burn_no_time_waiting() {
    let before = descriptors();
    let pool = Pool::new(1);
    let mut open = Vec::new();
    for _ in 0..40 {
        let (mut client, mut server, tunnel) = start(&pool).await;
        carry(&mut client, &mut server, 2_000_000).await;
        carry(&mut server, &mut client, 2_000_000).await;
        open.push((client, server, tunnel));
    }
    // Four sockets a tunnel, and the two pipes of the pool, one of each width.
    let settled = async {
        while descriptors() > before + 40 * 4 + 4 {
            tokio::task::yield_now().await;
        }
    };
    timeout(SOON, settled).await.expect("no more descriptors than that");

    let (mut client, stopped, tunnel) = start(&pool).await;
    while timeout(Duration::from_millis(200), client.write(&[0; 65536])).await.is_ok() {}
    let burnt = cpu();
    tokio::time::sleep(Duration::from_millis(500)).await;
    let burnt = cpu() - burnt;
    assert!(burnt < Duration::from_millis(20), "{burnt:?} of 500 ms, with nothing to do");
    open.push((client, stopped, tunnel));

    for (nth, (client, server, tunnel)) in open.into_iter().enumerate() {
        // Some end one way, some the other; the last with a full pipe.
        let first = if nth % 2 == 0 { (client, server) } else { (server, client) };
        drop(first.0);
        drop(first.1);
        let ended = timeout(SOON, tunnel).await.expect("an end in time").expect("no panic");
        assert_eq!(ended.why == Why::Closed, nth < 40, "{nth}: {ended:?}");
    }
    drop(pool);
    assert_eq!(descriptors(), before);
}
