//! Upstreams that answer wrongly, late, too much or byte by byte, and whoever answers in their place:
//! a lookup ends in time, and no address of such an answer is believed.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};

use dns::Family;
use hickory_proto::op::{Message, Query, ResponseCode};
use hickory_proto::rr::{Name, RecordType};
use policy::Host;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::UdpSocket;
use tokio::task::JoinSet;

use crate::upstream::{Said, Upstream, address, alias, bound};
use crate::world::{POLICY, extended, resolver_at, told, world_at};

/// Longer than the lookup's own time (2 s), on a busy machine.
const BOUND: Duration = Duration::from_secs(8);
const TRUE: &str = "93.184.216.34";
const FALSE: &str = "45.66.0.66";

/// What goes back over UDP for a query: datagrams, and when.
type Volley = Vec<(Duration, Vec<u8>)>;

/// A datagram for a query.
type Says = fn(&[u8]) -> Vec<u8>;

/// A server that is handed the bytes of a query and says bytes.
struct Raw {
    address: SocketAddr,
    datagrams: Arc<AtomicUsize>,
    streams: Arc<AtomicUsize>,
    _serving: JoinSet<()>,
}

impl Raw {
    /// Over TCP: what a stream is sent, whole, after its first query; pieces are sent one by one.
    async fn start(
        udp_says: impl Fn(&[u8]) -> Volley + Send + 'static,
        tcp_says: impl Fn(&[u8]) -> Vec<Vec<u8>> + Send + Sync + 'static,
    ) -> Self {
        let (udp, tcp) = bound().await;
        let address = udp.local_addr().expect("address");
        let (datagrams, streams) = (Arc::<AtomicUsize>::default(), Arc::<AtomicUsize>::default());
        let (udp_count, tcp_count) = (datagrams.clone(), streams.clone());
        let mut serving = JoinSet::new();
        serving.spawn(async move {
            let (mut query, mut sending) = ([0; 4096], JoinSet::new());
            while let Ok((length, from)) = udp.recv_from(&mut query).await {
                udp_count.fetch_add(1, SeqCst);
                for (delay, bytes) in udp_says(&query[..length]) {
                    let udp = udp.clone();
                    sending.spawn(async move {
                        tokio::time::sleep(delay).await;
                        let _ = udp.send_to(&bytes, from).await;
                    });
                }
            }
        });
        let tcp_says = Arc::new(tcp_says);
        serving.spawn(async move {
            let mut talking = JoinSet::new();
            while let Ok((mut stream, _)) = tcp.accept().await {
                tcp_count.fetch_add(1, SeqCst);
                let says = tcp_says.clone();
                talking.spawn(async move {
                    while let Ok(length) = stream.read_u16().await {
                        let mut query = vec![0; length.into()];
                        if stream.read_exact(&mut query).await.is_err() {
                            return;
                        }
                        for piece in says(&query) {
                            if stream.write_all(&piece).await.is_err() {
                                return;
                            }
                            tokio::time::sleep(Duration::from_millis(1)).await;
                        }
                    }
                });
            }
        });
        Self { address, datagrams, streams, _serving: serving }
    }

    /// Over UDP only; streams are closed unanswered.
    async fn udp(says: impl Fn(&[u8]) -> Volley + Send + 'static) -> Self {
        Self::start(says, |_| vec![]).await
    }
}

/// The true answer to a query, after `change`.
fn answer(query: &[u8], ip: &str, change: impl FnOnce(&mut Message)) -> Vec<u8> {
    let query = Message::from_vec(query).expect("our own resolver writes valid queries");
    let question = query.queries[0].clone();
    let mut message = Message::response(query.metadata.id, query.metadata.op_code);
    message.metadata.recursion_available = true;
    message.add_query(question.clone());
    if question.query_type() == RecordType::A {
        message.add_answer(address(&question.name().to_ascii(), ip, 60));
    }
    change(&mut message);
    message.to_vec().expect("encodable")
}

fn soon(bytes: Vec<u8>) -> (Duration, Vec<u8>) {
    (Duration::ZERO, bytes)
}

fn later(bytes: Vec<u8>) -> (Duration, Vec<u8>) {
    (Duration::from_millis(100), bytes)
}

fn framed(message: &[u8]) -> Vec<u8> {
    let length = u16::try_from(message.len()).expect("length");
    [&length.to_be_bytes(), message].concat()
}

/// The addresses found through this server, or none, within [`BOUND`].
async fn found(server: &Raw) -> Option<Vec<String>> {
    let host = Host::parse("host.wild.example.com").expect("host");
    let start = Instant::now();
    let found = resolver_at(&[server.address]).addresses(&host, Family::V4).await;
    assert!(start.elapsed() < BOUND, "{:?}", start.elapsed());
    found.ok().map(|answer| answer.addresses.iter().map(ToString::to_string).collect())
}

/// Attack C15. Whoever answers first with the wrong id or another question is not believed, and the
/// true answer behind it still is.
#[tokio::test]
async fn answers_with_another_id_or_question_are_passed_over_for_the_true_one() {
    let true_one = |query: &[u8]| later(answer(query, TRUE, |_| ()));
    let wrong_id = Raw::udp(move |query| {
        let false_ones = (1..=200_u16).map(|n| {
            soon(answer(query, FALSE, |message| {
                message.metadata.id = message.metadata.id.wrapping_add(n)
            }))
        });
        false_ones.chain([true_one(query)]).collect()
    })
    .await;
    assert_eq!(found(&wrong_id).await, Some(vec![TRUE.into()]));
    let other_question = Raw::udp(move |query| {
        let forged = answer(query, FALSE, |message| {
            let name = Name::from_ascii("other.wild.example.com.").expect("name");
            message.queries = vec![Query::query(name, RecordType::A)];
        });
        vec![soon(forged), true_one(query)]
    })
    .await;
    assert_eq!(found(&other_question).await, Some(vec![TRUE.into()]));
}

/// Attack C15. The letters of a question are in random case: a forger has to guess them too.
#[tokio::test]
async fn an_answer_in_another_letter_case_is_not_believed_but_asked_for_again_over_tcp() {
    let flat = |query: &[u8], ip: &str| {
        answer(query, ip, |message| {
            for question in &mut message.queries {
                *question = Query::query(question.name().to_lowercase(), question.query_type());
            }
        })
    };
    let server = Raw::start(
        move |query| vec![soon(flat(query, FALSE))],
        move |query| vec![framed(&flat(query, TRUE))],
    )
    .await;
    // A name of many letters is in one case only by a chance that never comes.
    assert_eq!(found(&server).await, Some(vec![TRUE.into()]));
    assert_eq!(server.streams.load(SeqCst), 1);
    let without_tcp = Raw::udp(move |query| vec![soon(flat(query, FALSE))]).await;
    assert_eq!(found(&without_tcp).await, None);
    assert!(without_tcp.datagrams.load(SeqCst) > 0, "control: it was asked");
}

/// Attack C15.
#[tokio::test]
async fn garbage_silence_and_lateness_end_in_time_without_an_address() {
    let garbage: [Says; 5] = [
        |query| query.to_vec(),
        |query| [&query[..2], &[0xff; 300]].concat(),
        |query| query[..7].to_vec(),
        |_| vec![],
        // Four billion answers announced, none there.
        |query| {
            [&query[..2], &[0x81, 0x80, 0, 1, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff], &query[12..]]
                .concat()
        },
    ];
    for (n, says) in garbage.into_iter().enumerate() {
        let server = Raw::udp(move |query| vec![soon(says(query))]).await;
        assert_eq!(found(&server).await, None, "garbage {n}");
        assert!(server.datagrams.load(SeqCst) > 0, "control: it was asked");
    }
    let late = Raw::udp(|query| vec![(Duration::from_secs(60), answer(query, TRUE, |_| ()))]).await;
    assert_eq!(found(&late).await, None);
}

/// Attacks C15, C20. Truncated over UDP, and over TCP for ever.
#[tokio::test]
async fn an_answer_that_is_always_truncated_ends_in_time() {
    let cut = |query: &[u8]| {
        answer(query, FALSE, |message| {
            message.metadata.truncation = true;
            message.answers.clear();
        })
    };
    let server =
        Raw::start(move |query| vec![soon(cut(query))], move |query| vec![framed(&cut(query))])
            .await;
    assert_eq!(found(&server).await, None);
    assert!(server.streams.load(SeqCst) > 0, "control: TCP was tried");
    let asked = server.datagrams.load(SeqCst) + server.streams.load(SeqCst);
    assert!(asked < 20, "{asked} times");
}

/// Attacks C15, C20. A stream that comes byte by byte is an answer like any other; one that stops in
/// the middle is none.
#[tokio::test]
async fn an_upstreams_stream_may_be_cut_anywhere_and_may_not_stop() {
    let cut = |query: &[u8]| {
        let cut = answer(query, FALSE, |message| {
            message.metadata.truncation = true;
            message.answers.clear();
        });
        vec![soon(cut)]
    };
    let whole = |query: &[u8]| framed(&answer(query, TRUE, |_| ()));
    let slow =
        Raw::start(cut, move |query| whole(query).into_iter().map(|byte| vec![byte]).collect())
            .await;
    assert_eq!(found(&slow).await, Some(vec![TRUE.into()]));
    let stuck = Raw::start(cut, move |query| {
        let whole = whole(query);
        vec![whole[..whole.len() - 1].to_vec()]
    })
    .await;
    assert_eq!(found(&stuck).await, None);
}

/// Attacks C12, C15. As large as an answer can be, every name compressed or not: read in time, and
/// cut to what a guest may be told.
#[tokio::test]
async fn a_huge_answer_is_read_in_time_and_little_of_it_kept() {
    let huge = |query: &[u8]| {
        answer(query, TRUE, |message| {
            let owner = message.queries[0].name().to_ascii();
            for n in 0..1200_u32 {
                let ip = std::net::Ipv4Addr::from_bits(0x5db8_d900 + n).to_string();
                message.add_answer(address(&owner, &ip, 60));
            }
        })
    };
    let cut = |query: &[u8]| {
        let cut = answer(query, FALSE, |message| {
            message.metadata.truncation = true;
            message.answers.clear();
        });
        vec![soon(cut)]
    };
    let many = Raw::start(cut, move |query| vec![framed(&huge(query))]).await;
    assert_eq!(found(&many).await.map(|found| found.len()), Some(32));
    // Names that share no ending, each as long as may be: the most work for who reads them.
    let strange = move |query: &[u8]| {
        answer(query, TRUE, |message| {
            for n in 0..250_u32 {
                let owner = format!("{0}{n:03}.{0}{n:03}.{0}{n:03}.{0}{n:03}.", "x".repeat(57));
                message.add_additional(address(&owner, FALSE, 60));
            }
        })
    };
    let strange = Raw::start(cut, move |query| vec![framed(&strange(query))]).await;
    assert_eq!(found(&strange).await, Some(vec![TRUE.into()]));
}

/// Attack C06. What stands beside the answer, in whatever section, is not believed.
#[tokio::test]
async fn records_of_other_names_are_ignored_in_every_section() {
    let server = Raw::udp(|query| {
        let poisoned = answer(query, TRUE, |message| {
            let own = message.queries[0].name().to_ascii();
            for owner in ["example.com.", "api.allowed.example.", "."] {
                message.add_answer(address(owner, FALSE, 60));
                message.add_authority(address(owner, FALSE, 60));
                message.add_additional(address(owner, FALSE, 60));
            }
            message.add_authority(address(&own, FALSE, 60));
            message.add_additional(address(&own, FALSE, 60));
            message.add_answer(alias("elsewhere.example.", &own, 60));
        });
        vec![soon(poisoned)]
    })
    .await;
    assert_eq!(found(&server).await, Some(vec![TRUE.into()]));
}

/// Attack C15. A guest whose resolvers are all dead, lie or fail is told so, and no address.
#[tokio::test]
async fn a_guest_of_dead_or_failing_upstreams_gets_servfail_with_the_reason() {
    let gone = UdpSocket::bind("127.0.0.1:0").await.expect("udp").local_addr().expect("address");
    let failing = Upstream::start(|_| Said::code(ResponseCode::ServFail)).await;
    let refusing = Upstream::start(|_| Said::code(ResponseCode::Refused)).await;
    let garbage = Raw::udp(|query| vec![soon([&query[..2], &[0xff; 40]].concat())]).await;
    let world = world_at(POLICY, &[gone, failing.address, refusing.address, garbage.address]);
    for host in ["api.allowed.example.", "new.wild.example.com."] {
        let start = Instant::now();
        let answer = world.ask(host, RecordType::A).await;
        assert!(start.elapsed() < BOUND, "{:?}", start.elapsed());
        assert_eq!(answer.response_code, ResponseCode::ServFail, "{host}");
        let (info, text) = extended(&answer).expect("why");
        assert!(matches!(info, 22 | 23) && text == "postern:unresolvable", "{info} {text}");
        assert_eq!(told(&answer), [""; 0]);
    }
    // A name that is refused needs nobody, and is refused as ever.
    let refused = world.ask("evil.example.", RecordType::A).await;
    assert_eq!(extended(&refused), Some((17, "postern:no-rule".into())));
}
