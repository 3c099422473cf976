//! The authority that signs every origin of a world, and what a client needs to believe it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair, KeyUsagePurpose};
use rustls::crypto::aws_lc_rs;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use rustls::{ClientConfig, RootCertStore, ServerConfig};

/// A certificate authority of one test run.
#[derive(Clone, Debug)]
pub struct Authority {
    minted: Arc<Minted>,
    pem: Arc<str>,
    root: CertificateDer<'static>,
}

impl Authority {
    /// A new one.
    ///
    /// # Panics
    /// When no key can be made.
    #[must_use]
    pub fn new() -> Self {
        let key = KeyPair::generate().expect("key of the authority");
        let mut params = CertificateParams::default();
        params.distinguished_name.push(rcgen::DnType::CommonName, "the world's authority");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        let certificate = params.self_signed(&key).expect("certificate of the authority");
        Self {
            pem: certificate.pem().into(),
            root: certificate.der().clone(),
            minted: Arc::new(Minted { issuer: Issuer::new(params, key), leaves: Mutex::default() }),
        }
    }

    /// Its certificate, PEM.
    #[must_use]
    pub fn pem(&self) -> &str {
        &self.pem
    }

    /// A TLS server that has a certificate for whatever name a client says.
    ///
    /// # Panics
    /// Never, with this provider.
    #[must_use]
    pub fn server(&self) -> ServerConfig {
        let mut config = ServerConfig::builder_with_provider(aws_lc_rs::default_provider().into())
            .with_safe_default_protocol_versions()
            .expect("versions")
            .with_no_client_auth()
            .with_cert_resolver(self.minted.clone());
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        config
    }

    /// A certificate for this name and its key, PEM: for servers that read them from files.
    ///
    /// # Panics
    /// When `name` cannot be in a certificate.
    #[must_use]
    pub fn identity(&self, name: &str) -> (String, String) {
        let key = KeyPair::generate().expect("a key");
        let params = CertificateParams::new(vec![name.to_owned()]).expect("a name");
        let leaf = params.signed_by(&key, &self.minted.issuer).expect("a certificate");
        (leaf.pem(), key.serialize_pem())
    }

    /// A TLS client that believes this authority alone.
    ///
    /// # Panics
    /// Never, with this provider.
    #[must_use]
    pub fn client(&self) -> ClientConfig {
        let mut roots = RootCertStore::empty();
        roots.add(self.root.clone()).expect("our own root");
        ClientConfig::builder_with_provider(aws_lc_rs::default_provider().into())
            .with_safe_default_protocol_versions()
            .expect("versions")
            .with_root_certificates(roots)
            .with_no_client_auth()
    }
}

impl Default for Authority {
    fn default() -> Self {
        Self::new()
    }
}

struct Minted {
    issuer: Issuer<'static, KeyPair>,
    leaves: Mutex<HashMap<String, Arc<CertifiedKey>>>,
}

impl std::fmt::Debug for Minted {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Minted")
    }
}

impl ResolvesServerCert for Minted {
    fn resolve(&self, hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        let name = hello.server_name().unwrap_or("nameless.invalid").to_owned();
        let mut leaves = self.leaves.lock().expect("leaves");
        if let Some(leaf) = leaves.get(&name) {
            return Some(leaf.clone());
        }
        let key = KeyPair::generate().ok()?;
        let leaf = CertificateParams::new(vec![name.clone()]).ok()?.signed_by(&key, &self.issuer);
        let key = PrivateKeyDer::Pkcs8(key.serialize_der().into());
        let key = aws_lc_rs::sign::any_supported_type(&key).ok()?;
        let leaf = Arc::new(CertifiedKey::new(vec![leaf.ok()?.der().clone()], key));
        leaves.insert(name, leaf.clone());
        Some(leaf)
    }
}
