//! The upstream DNS server of a world: answers from a table, over UDP and TCP, and remembers every
//! question. A question that is not in its list never left the router.

use std::collections::{HashMap, HashSet};
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex};

use hickory_proto::op::{Message, Query, ResponseCode};
use hickory_proto::rr::rdata::CNAME;
use hickory_proto::rr::{Name, RData, Record, RecordType};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UdpSocket};

/// What a name answers: one set of addresses a time it is asked; the last one stays.
#[derive(Clone, Debug)]
struct Entry {
    turns: Vec<Vec<IpAddr>>,
    ttl: u32,
}

/// One question that arrived.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Asked {
    /// The name, lower case, without the last dot.
    pub name: String,
    /// Its type.
    pub kind: RecordType,
    /// Who asked.
    pub peer: SocketAddr,
}

/// The table and the memory. Clones share both.
#[derive(Clone, Debug, Default)]
pub struct Nameserver {
    table: Arc<Mutex<HashMap<String, Entry>>>,
    aliases: Arc<Mutex<HashMap<String, String>>>,
    asked: Arc<Mutex<Vec<Asked>>>,
    silent: Arc<Mutex<HashSet<String>>>,
    flat: Arc<Mutex<HashSet<String>>>,
}

impl Nameserver {
    /// `name` has these addresses from now on.
    pub fn set(&self, name: &str, addresses: &[IpAddr]) {
        self.set_turns(name, 60, vec![addresses.to_vec()]);
    }

    /// The first question for `name` gets the first set, and so on; the last one stays.
    ///
    /// # Panics
    /// When the server panicked.
    pub fn set_turns(&self, name: &str, ttl: u32, turns: Vec<Vec<IpAddr>>) {
        self.silent.lock().expect("silent").remove(&name.to_ascii_lowercase());
        self.table.lock().expect("table").insert(name.to_ascii_lowercase(), Entry { turns, ttl });
    }

    /// Questions for `name` are heard and not answered from now on.
    ///
    /// # Panics
    /// When the server panicked.
    pub fn silence(&self, name: &str) {
        self.silent.lock().expect("silent").insert(name.to_ascii_lowercase());
    }

    /// Questions for `name` are repeated in lower case from now on, however they came.
    ///
    /// # Panics
    /// When the server panicked.
    pub fn flatten(&self, name: &str) {
        self.flat.lock().expect("flat").insert(name.to_ascii_lowercase());
    }

    /// `name` is another name for `target` from now on (CNAME).
    ///
    /// # Panics
    /// When the server panicked.
    pub fn set_alias(&self, name: &str, target: &str) {
        self.aliases.lock().expect("aliases").insert(name.to_ascii_lowercase(), target.to_owned());
    }

    /// Every question so far about `name` or a name below it.
    ///
    /// # Panics
    /// When the server panicked.
    #[must_use]
    pub fn asked(&self, name: &str) -> Vec<Asked> {
        let below = format!(".{name}");
        let asked = self.asked.lock().expect("asked");
        asked.iter().filter(|q| q.name == name || q.name.ends_with(&below)).cloned().collect()
    }

    /// Serves port 53 of these addresses in the calling thread's namespace; ends with its runtime.
    /// A socket an address: a reply must come from where the question went.
    ///
    /// # Errors
    /// When a port cannot be bound.
    pub async fn serve(self, addresses: &[Ipv4Addr]) -> io::Result<()> {
        for address in addresses {
            let udp = UdpSocket::bind((*address, 53)).await?;
            let tcp = TcpListener::bind((*address, 53)).await?;
            let (datagrams, streams) = (self.clone(), self.clone());
            tokio::spawn(async move {
                while let Ok((stream, peer)) = tcp.accept().await {
                    tokio::spawn(streams.clone().serve_stream(stream, peer));
                }
            });
            tokio::spawn(async move {
                let mut query = [0; 4096];
                while let Ok((length, peer)) = udp.recv_from(&mut query).await {
                    if let Some(reply) = datagrams.answer(&query[..length], peer) {
                        let _ = udp.send_to(&reply, peer).await;
                    }
                }
            });
        }
        Ok(())
    }

    async fn serve_stream(self, mut stream: TcpStream, peer: SocketAddr) {
        while let Ok(length) = stream.read_u16().await {
            let mut query = vec![0; usize::from(length)];
            if stream.read_exact(&mut query).await.is_err() {
                return;
            }
            let Some(reply) = self.answer(&query, peer) else { return };
            let length = u16::try_from(reply.len()).expect("a short reply");
            let framed = [&length.to_be_bytes()[..], &reply].concat();
            if stream.write_all(&framed).await.is_err() {
                return;
            }
        }
    }

    fn answer(&self, query: &[u8], peer: SocketAddr) -> Option<Vec<u8>> {
        let query = Message::from_vec(query).ok()?;
        let mut question = query.queries.first()?.clone();
        let name = question.name().to_ascii().to_ascii_lowercase();
        let name = name.trim_end_matches('.').to_owned();
        let kind = question.query_type();
        if self.flat.lock().expect("flat").contains(&name) {
            question = Query::query(question.name().to_lowercase(), kind);
        }
        let mut table = self.table.lock().expect("table");
        let mut reply = Message::response(query.metadata.id, query.metadata.op_code);
        reply.metadata.recursion_desired = query.metadata.recursion_desired;
        reply.metadata.recursion_available = true;
        reply.add_query(question.clone());
        let mut owner = question.name().clone();
        let alias = self.aliases.lock().expect("aliases").get(&name).cloned();
        if let Some(target) = alias.as_ref().and_then(|target| Name::from_ascii(target).ok()) {
            reply.add_answer(Record::from_rdata(owner, 60, RData::CNAME(CNAME(target.clone()))));
            owner = target;
        }
        match table.get_mut(alias.as_ref().unwrap_or(&name)) {
            None => reply.metadata.response_code = ResponseCode::NXDomain,
            Some(entry) => {
                let addresses = entry.turns.first().cloned().unwrap_or_default();
                let data = addresses.iter().filter_map(|address| match (kind, address) {
                    (RecordType::A, IpAddr::V4(v4)) => Some(RData::A((*v4).into())),
                    (RecordType::AAAA, IpAddr::V6(v6)) => Some(RData::AAAA((*v6).into())),
                    _ => None,
                });
                for data in data {
                    reply.add_answer(Record::from_rdata(owner.clone(), entry.ttl, data));
                }
                if kind == RecordType::A && entry.turns.len() > 1 {
                    entry.turns.remove(0);
                }
            }
        }
        let silent = self.silent.lock().expect("silent").contains(&name);
        self.asked.lock().expect("asked").push(Asked { name, kind, peer });
        if silent { None } else { reply.to_vec().ok() }
    }
}
