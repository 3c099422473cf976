//! Questions over a stream.

use std::time::Duration;

use hickory_proto::op::Message;
use hickory_proto::rr::RecordType;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream, duplex};

use crate::upstream::{Said, Upstream, address};
use crate::world::{ASKED, POLICY, query, told, world};

fn framed(message: &[u8]) -> Vec<u8> {
    let length = u16::try_from(message.len()).expect("length");
    [&length.to_be_bytes(), message].concat()
}

async fn next(stream: &mut DuplexStream) -> Message {
    let length = stream.read_u16().await.expect("length");
    let mut bytes = vec![0; length.into()];
    stream.read_exact(&mut bytes).await.expect("answer");
    Message::from_vec(&bytes).expect("readable")
}

/// Attack C20.
#[tokio::test]
async fn a_stream_cut_at_every_byte_gets_the_answers_of_datagrams() {
    let upstream = Upstream::with(&["93.184.216.34", "93.184.216.35"]).await;
    let world = world(POLICY, &[&upstream]);
    let (mut client, server) = duplex(1);
    let talk = async {
        for (host, record_type) in [
            ("api.allowed.example.", RecordType::A),
            ("x.evil.example.", RecordType::A),
            ("api.allowed.example.", RecordType::TXT),
        ] {
            for byte in framed(&query(host, record_type)) {
                client.write_all(&[byte]).await.expect("write");
            }
            let mut streamed = next(&mut client).await;
            // The pin is there when the first byte of the answer is.
            if !streamed.answers.is_empty() {
                let address = "93.184.216.35".parse().expect("address");
                assert_eq!(world.pins.names(address).names[0].as_str(), "api.allowed.example");
            }
            let datagram = world.ask(host, record_type).await;
            streamed.metadata.id = datagram.metadata.id;
            assert_eq!(streamed, datagram);
        }
        drop(client);
    };
    let (served, ()) = tokio::join!(world.guest.serve_stream(server, ASKED), talk);
    served.expect("a clean end");
}

#[tokio::test]
async fn a_slow_question_does_not_hold_up_those_behind_it() {
    let upstream = Upstream::start(|query| {
        let owner = query.name().to_ascii();
        let delay = Duration::from_millis(if owner.starts_with("slow") { 300 } else { 0 });
        Said { delay, ..Said::records([address(&owner, "93.184.216.34", 60)]) }
    })
    .await;
    let world = world(POLICY, &[&upstream]);
    let (mut client, server) = duplex(65_536);
    let talk = async {
        let pipelined = [
            framed(&query("slow.wild.example.com.", RecordType::A)),
            framed(&query("quick.wild.example.com.", RecordType::A)),
        ];
        client.write_all(&pipelined.concat()).await.expect("write");
        client.shutdown().await.expect("half-close");
        let names = [next(&mut client).await, next(&mut client).await].map(|answer| {
            assert_eq!(told(&answer), ["93.184.216.34"]);
            answer.queries[0].name.to_ascii()
        });
        assert_eq!(names, ["quick.wild.example.com.", "slow.wild.example.com."]);
    };
    let (served, ()) = tokio::join!(world.guest.serve_stream(server, ASKED), talk);
    served.expect("a clean end");
}

#[tokio::test]
async fn more_questions_than_are_answered_at_once_are_all_answered() {
    let upstream = Upstream::with(&["93.184.216.34"]).await;
    let world = world(POLICY, &[&upstream]);
    let (mut client, server) = duplex(256);
    let (served, ()) = tokio::join!(world.guest.serve_stream(server, ASKED), async {
        let (mut reading, mut writing) = tokio::io::split(&mut client);
        let send = async {
            for n in 0..100 {
                let host = format!("n{n}.wild.example.com.");
                writing.write_all(&framed(&query(&host, RecordType::A))).await.expect("write");
            }
        };
        let receive = async {
            for _ in 0..100 {
                let length = reading.read_u16().await.expect("length");
                let mut bytes = vec![0; length.into()];
                reading.read_exact(&mut bytes).await.expect("answer");
                assert_eq!(told(&Message::from_vec(&bytes).expect("readable")).len(), 1);
            }
        };
        tokio::join!(send, receive);
        drop(client);
    });
    served.expect("a clean end");
}

#[tokio::test]
async fn a_message_longer_than_any_query_ends_the_stream() {
    let world = world(POLICY, &[&Upstream::with(&[]).await]);
    let (mut client, server) = duplex(64);
    client.write_all(&[0xff, 0xff, 0]).await.expect("write");
    let error = world.guest.serve_stream(server, ASKED).await.expect_err("too long");
    assert_eq!(error.kind(), std::io::ErrorKind::InvalidData);
}
