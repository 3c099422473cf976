//! A small DNS server over UDP and TCP on loopback.

use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use hickory_proto::op::{Message, Query, ResponseCode};
use hickory_proto::rr::rdata::{A, AAAA, CNAME};
use hickory_proto::rr::{Name, RData, Record, RecordType};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, UdpSocket};
use tokio::task::JoinSet;

/// What the server says to one question.
#[derive(Clone, Debug, Default)]
pub(crate) struct Said {
    pub(crate) code: ResponseCode,
    pub(crate) answers: Vec<Record>,
    pub(crate) additionals: Vec<Record>,
    /// Over UDP only the header, with TC.
    pub(crate) cut: bool,
    pub(crate) silent: bool,
    pub(crate) delay: Duration,
}

impl Said {
    pub(crate) fn records(answers: impl IntoIterator<Item = Record>) -> Self {
        Self { answers: answers.into_iter().collect(), ..Self::default() }
    }
    pub(crate) fn code(code: ResponseCode) -> Self {
        Self { code, ..Self::default() }
    }
    pub(crate) fn silence() -> Self {
        Self { silent: true, ..Self::default() }
    }
}

pub(crate) fn name(text: &str) -> Name {
    Name::from_ascii(text).expect("name")
}

pub(crate) fn address(owner: &str, address: &str, ttl: u32) -> Record {
    let data = match address.parse().expect("address") {
        IpAddr::V4(v4) => RData::A(A(v4)),
        IpAddr::V6(v6) => RData::AAAA(AAAA(v6)),
    };
    Record::from_rdata(name(owner), ttl, data)
}

pub(crate) fn alias(owner: &str, target: &str, ttl: u32) -> Record {
    Record::from_rdata(name(owner), ttl, RData::CNAME(CNAME(name(target))))
}

type Asked = Arc<Mutex<Vec<(String, RecordType)>>>;

pub(crate) struct Upstream {
    pub(crate) address: SocketAddr,
    asked: Asked,
    _serving: JoinSet<()>,
}

/// Sockets for both transports, on one port.
pub(crate) async fn bound() -> (Arc<UdpSocket>, TcpListener) {
    loop {
        let udp = UdpSocket::bind("127.0.0.1:0").await.expect("udp");
        if let Ok(tcp) = TcpListener::bind(udp.local_addr().expect("address")).await {
            return (Arc::new(udp), tcp);
        }
    }
}

impl Upstream {
    /// Starts a server that answers with `say`, which sees the question in lower case; the answer
    /// repeats it as it came.
    pub(crate) async fn start(
        say: impl Fn(&Query) -> Said + Clone + Send + Sync + 'static,
    ) -> Self {
        let (udp, tcp) = bound().await;
        let address = udp.local_addr().expect("address");
        let asked = Asked::default();
        let mut serving = JoinSet::new();
        serving.spawn(serve_udp(udp, say.clone(), asked.clone()));
        serving.spawn(serve_tcp(tcp, say, asked.clone()));
        Self { address, asked, _serving: serving }
    }

    /// A server that has this one address for every name.
    pub(crate) async fn with(addresses: &'static [&'static str]) -> Self {
        Self::start(move |query| {
            let owner = query.name().to_ascii();
            let records = addresses.iter().map(|text| address(&owner, text, 60));
            Said::records(records.filter(|record| record.record_type() == query.query_type()))
        })
        .await
    }

    /// Everything it was asked, in order: names in lower case with the final dot.
    pub(crate) fn asked(&self) -> Vec<(String, RecordType)> {
        self.asked.lock().expect("asked").clone()
    }

    pub(crate) fn names(&self) -> Vec<String> {
        self.asked().into_iter().map(|(name, _)| name).collect()
    }
}

fn reply(
    bytes: &[u8],
    say: &impl Fn(&Query) -> Said,
    asked: &Asked,
    udp: bool,
) -> (Duration, Option<Vec<u8>>) {
    let query = Message::from_vec(bytes).expect("our own resolver writes valid queries");
    let question = query.queries[0].clone();
    let plain = Query::query(question.name().to_lowercase(), question.query_type());
    asked.lock().expect("asked").push((plain.name().to_ascii(), plain.query_type()));
    let said = say(&plain);
    let mut message = Message::response(query.metadata.id, query.metadata.op_code);
    message.metadata.recursion_desired = true;
    message.metadata.recursion_available = true;
    message.metadata.response_code = said.code;
    message.add_query(question);
    if udp && said.cut {
        message.metadata.truncation = true;
    } else {
        message.add_answers(said.answers);
        message.add_additionals(said.additionals);
    }
    (said.delay, (!said.silent).then(|| message.to_vec().expect("encodable")))
}

async fn serve_udp(udp: Arc<UdpSocket>, say: impl Fn(&Query) -> Said, asked: Asked) {
    let mut sending = JoinSet::new();
    let mut buffer = [0; 4096];
    loop {
        let (length, from) = udp.recv_from(&mut buffer).await.expect("receive");
        let (delay, answer) = reply(&buffer[..length], &say, &asked, true);
        let udp = udp.clone();
        sending.spawn(async move {
            tokio::time::sleep(delay).await;
            if let Some(answer) = answer {
                udp.send_to(&answer, from).await.expect("send");
            }
        });
    }
}

async fn serve_tcp(
    tcp: TcpListener,
    say: impl Fn(&Query) -> Said + Clone + Send + 'static,
    asked: Asked,
) {
    let mut streams = JoinSet::new();
    loop {
        let (mut stream, _) = tcp.accept().await.expect("accept");
        let (say, asked) = (say.clone(), asked.clone());
        streams.spawn(async move {
            while let Ok(length) = stream.read_u16().await {
                let mut query = vec![0; length.into()];
                stream.read_exact(&mut query).await.expect("query");
                let (_, Some(answer)) = reply(&query, &say, &asked, false) else { continue };
                stream
                    .write_u16(u16::try_from(answer.len()).expect("length"))
                    .await
                    .expect("write");
                stream.write_all(&answer).await.expect("write");
            }
        });
    }
}
