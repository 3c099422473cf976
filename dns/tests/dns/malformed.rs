//! Bytes no honest client sends.

use dns::Transport;
use dns::question::Question;
use hickory_proto::op::{Message, ResponseCode};
use hickory_proto::rr::RecordType;
use policy::audit::Outcome;
use proptest::prelude::*;

use crate::upstream::Upstream;
use crate::world::{ASKED, POLICY, extended, query, world};

const QUESTION: &[u8] = b"\x03api\x07allowed\x07example\x00\x00\x01\x00\x01";
const OPT: &[u8] = b"\x00\x00\x29\x04\xd0\x00\x00\x00\x00\x00\x00";

fn message(flags: [u8; 2], counts: [u8; 4], sections: &[&[u8]]) -> Vec<u8> {
    let [queries, answers, authorities, additionals] = counts;
    let counts = [0, queries, 0, answers, 0, authorities, 0, additionals];
    [&[0xab, 0xcd], &flags[..], &counts, &sections.concat()].concat()
}

/// Attack C11.
#[tokio::test]
async fn what_cannot_be_read_is_answered_with_its_code_or_not_at_all() {
    let upstream = Upstream::with(&["93.184.216.34"]).await;
    let world = world(POLICY, &[&upstream]);
    let record = b"\xc0\x0c\x00\x01\x00\x01\x00\x00\x00\x3c\x00\x04\x01\x02\x03\x04";
    let chaos = b"\x07version\x04bind\x00\x00\x10\x00\x03";
    let version_1 = b"\x00\x00\x29\x04\xd0\x00\x01\x00\x00\x00\x00";
    let form = Some(ResponseCode::FormErr);
    let not_implemented = Some(ResponseCode::NotImp);
    let cases: &[(&str, Vec<u8>, Option<ResponseCode>)] = &[
        ("nothing", vec![], None),
        ("half a header", vec![0xab, 0xcd, 1, 0, 0, 1], None),
        ("a response", message([0x81, 0x80], [1, 0, 0, 0], &[QUESTION]), None),
        ("no question", message([1, 0], [0, 0, 0, 0], &[]), form),
        ("two questions", message([1, 0], [2, 0, 0, 0], &[QUESTION, QUESTION]), form),
        (
            "65535 questions",
            [&[0xab, 0xcd, 1, 0, 0xff, 0xff, 0, 0, 0, 0, 0, 0], QUESTION].concat(),
            form,
        ),
        ("a record in the answer", message([1, 0], [1, 1, 0, 0], &[QUESTION, record]), form),
        ("a record in the authority", message([1, 0], [1, 0, 1, 0], &[QUESTION, record]), form),
        ("two OPT", message([1, 0], [1, 0, 0, 2], &[QUESTION, OPT, OPT]), form),
        ("an OPT that is cut", message([1, 0], [1, 0, 0, 1], &[QUESTION, &OPT[..7]]), form),
        ("a missing OPT", message([1, 0], [1, 0, 0, 1], &[QUESTION]), form),
        (
            "a name that points at itself",
            message([1, 0], [1, 0, 0, 0], &[b"\xc0\x0c\x00\x01\x00\x01"]),
            form,
        ),
        (
            "a name that points ahead",
            message([1, 0], [1, 0, 0, 0], &[b"\xc0\x20\x00\x01\x00\x01"]),
            form,
        ),
        ("a name that is cut", message([1, 0], [1, 0, 0, 0], &[b"\x3fabc"]), form),
        (
            "a reserved label type",
            message([1, 0], [1, 0, 0, 0], &[b"\x80abc\x00\x00\x01\x00\x01"]),
            form,
        ),
        (
            "a name of 300 bytes",
            message(
                [1, 0],
                [1, 0, 0, 0],
                &[&[b"\x3b".as_slice(), &[b'a'; 59]].concat().repeat(5), b"\0\0\x01\0\x01"],
            ),
            form,
        ),
        ("too long", message([1, 0], [1, 0, 0, 0], &[QUESTION, &[0; 1300]]), form),
        ("an update", message([0x28, 0], [1, 0, 0, 0], &[QUESTION]), not_implemented),
        ("a notify", message([0x20, 0], [1, 0, 0, 0], &[QUESTION]), not_implemented),
        ("a status request", message([0x10, 0], [1, 0, 0, 0], &[QUESTION]), not_implemented),
        ("an unknown opcode", message([0x78, 0], [1, 0, 0, 0], &[QUESTION]), not_implemented),
        ("class CHAOS", message([1, 0], [1, 0, 0, 0], &[chaos]), Some(ResponseCode::Refused)),
        (
            "EDNS 1",
            message([1, 0], [1, 0, 0, 1], &[QUESTION, version_1]),
            Some(ResponseCode::BADVERS),
        ),
    ];
    for (what, bytes, expected) in cases {
        let answer = world.guest.answer(bytes, ASKED, Transport::Udp).await;
        let code = answer.map(|bytes| {
            let answer = Message::from_vec(&bytes).expect("readable");
            assert_eq!(answer.metadata.id, 0xabcd, "{what}");
            assert!(answer.queries.is_empty() && answer.answers.is_empty(), "{what}");
            let high = answer.edns.map_or(0, |edns| edns.rcode_high());
            u16::from(high) << 4 | u16::from(bytes[3] & 0xf)
        });
        assert_eq!(code, expected.map(u16::from), "{what}");
    }
    let records: Vec<_> = world.records.drain().collect();
    assert_eq!(records.len(), cases.len());
    assert!(records.iter().all(|record| record.outcome == Outcome::Deny));
    assert_eq!(upstream.asked(), []);
}

/// Attack C11.
#[tokio::test]
async fn names_no_host_has_are_bad_names_and_never_leave() {
    let upstream = Upstream::with(&["93.184.216.34"]).await;
    let world = world("default = \"allow\"", &[&upstream]);
    for labels in [
        &b"\x0bapi.allowed\x07example\x00"[..], // a dot inside a label
        b"\x04a\\bc\x07example\x00",
        b"\x03a\0b\x07example\x00",
        b"\x03a b\x07example\x00",
        b"\x02\xc3\xa4\x07example\x00",
        b"\x0410.1\x03168\x03192\x00",
        b"\x0a2130706433\x00",
        b"\x060x7f.1\x00",
    ] {
        let bytes = message([1, 0], [1, 0, 0, 1], &[labels, b"\x00\x01\x00\x01", OPT]);
        let answer = world.guest.answer(&bytes, ASKED, Transport::Udp).await.expect("answer");
        let answer = Message::from_vec(&answer).expect("readable");
        assert_eq!(answer.response_code, ResponseCode::NXDomain, "{labels:?}");
        assert_eq!(extended(&answer), Some((17, "postern:bad-name".into())), "{labels:?}");
    }
    let root = world.ask(".", RecordType::NS).await;
    assert_eq!(root.response_code, ResponseCode::Refused, "NXDOMAIN would deny every name");
    assert_eq!(extended(&root), Some((17, "postern:no-name".into())));
    assert_eq!(upstream.asked(), []);
    assert!(world.records.drain().all(|record| {
        record.name.is_some_and(|name| name.is_ascii() && !name.contains(char::is_control))
    }));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn reading_arbitrary_bytes_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..600)) {
        if let Ok(question) = Question::read(&bytes) {
            let _ = (question.host(), question.shown());
        }
    }

    #[test]
    fn any_query_with_a_few_bytes_changed_gets_a_readable_answer_or_none(
        host in "[a-z]{1,10}(\\.[a-z]{1,10}){0,4}\\.",
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..8),
        cut in prop::option::of(any::<prop::sample::Index>()),
    ) {
        let mut bytes = query(&host, RecordType::A);
        for (at, byte) in changes {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("runtime");
        runtime.block_on(async {
            let upstream = Upstream::with(&["93.184.216.34"]).await;
            let world = world("default = \"deny\"", &[&upstream]);
            for transport in [Transport::Udp, Transport::Tcp] {
                if let Some(answer) = world.guest.answer(&bytes, ASKED, transport).await {
                    assert_eq!(answer[..2], bytes[..2]);
                    Message::from_vec(&answer).expect("readable");
                }
            }
            assert_eq!(upstream.asked(), []);
        });
    }
}
