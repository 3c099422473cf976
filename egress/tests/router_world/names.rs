//! The names that a guest was told for one address: whatever else it looks up, the one that a rule denies
//! is remembered.

use std::io::ErrorKind;
use std::net::Ipv4Addr;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UdpSocket;

use crate::peers::{count, serve, soon};
use crate::place::{ORIGIN, Place, run};
use crate::{ask, is_reset};

/// Names may be told, their address is let out by itself, and one name of it is denied there.
const RULES: &str = r#"
[[rule]]
allow = ["*.example.com"]
[[rule]]
allow = ["93.184.216.34"]
ports = [7, 80]
[[rule]]
allow = ["93.184.216.34"]
ports = [3478]
protocol = "udp"
[[rule]]
deny = ["db.example.com", "*.db.example.com"]
ports = [7, 80, 3478]
"#;
const RESOLVER: Ipv4Addr = Ipv4Addr::new(169, 254, 100, 1);

/// Whether raw bytes, a request with the address as its host and a datagram get there: one answer of all.
async fn reaches(place: &Place) -> bool {
    let raw = !is_reset(place, ORIGIN, 7, b"hello\r\n").await;
    let mut web = soon(place.dial(ORIGIN, 80)).await.expect("connected");
    let request = format!("GET / HTTP/1.1\r\nHost: {ORIGIN}\r\nConnection: close\r\n\r\n");
    web.write_all(request.as_bytes()).await.expect("sent");
    let mut answer = String::new();
    soon(web.read_to_string(&mut answer)).await.expect("an answer");
    let udp: UdpSocket = place.datagrams();
    udp.connect((ORIGIN, 3478)).await.expect("a route");
    udp.send(b"ping").await.expect("sent");
    let datagram = match soon(udp.recv(&mut [0; 8])).await {
        Ok(_) => true,
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::HostUnreachable, "admin-prohibited");
            false
        }
    };
    let each = [raw, answer.starts_with("HTTP/1.1 200"), datagram];
    assert!(each == [raw; 3], "raw, HTTP, UDP: {each:?}: {answer}");
    raw
}

/// Promise 26. Attack C07. However many names of its own a guest looks up that lead to the same address.
#[test]
fn a_denied_name_of_an_address_is_not_pushed_out_by_others() {
    run(RULES, async |place| {
        let raw = serve(place.origin(ORIGIN, 7), async |mut stream| {
            let _ = stream.read(&mut [0; 64]).await;
            let _ = stream.write_all(b"ready").await;
        });
        let web = serve(place.origin(ORIGIN, 80), async |mut stream| {
            let mut head = [0; 512];
            let _ = stream.read(&mut head).await;
            let _ = stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n").await;
        });
        let udp = place.origin_datagrams(ORIGIN, 3478);
        tokio::spawn(async move {
            let mut word = [0; 64];
            while let Ok((length, peer)) = udp.recv_from(&mut word).await {
                let _ = udp.send_to(&word[..length], peer).await;
            }
        });
        let look_up = async |names: std::ops::Range<u8>, under: &str| {
            for n in names {
                let answer = ask(&place, RESOLVER, &format!("n{n}.{under}")).await;
                assert!(answer.windows(4).any(|four| four == ORIGIN.octets()), "{answer:?}");
            }
        };
        look_up(0..20, "example.com").await;
        assert!(reaches(&place).await, "control: no name of it is denied");
        let before = (count(&raw), count(&web));
        ask(&place, RESOLVER, "db.example.com").await;
        assert!(!reaches(&place).await, "control: the last name is denied");
        look_up(20..40, "example.com").await;
        assert!(!reaches(&place).await, "the denied one was pushed out");
        // By more that are denied than are kept, too.
        look_up(0..20, "db.example.com").await;
        look_up(40..60, "example.com").await;
        assert!(!reaches(&place).await, "all denied ones were pushed out");
        assert_eq!((count(&raw), count(&web)), before);

        // A policy that denies none of its names anywhere does not mind what was forgotten.
        let (allowed, _) = RULES.rsplit_once("[[rule]]").expect("rules");
        place.write(allowed, 2);
        assert!(reaches(&place).await, "control: nothing is denied any more");
    });
}
